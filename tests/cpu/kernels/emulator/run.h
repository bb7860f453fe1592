// One launch, a cluster after the other. KERNEL and its Args come before.
static const Args* given_;
static const char* wrong_;
static void entry_() {
  try {
    KERNEL(*given_);
  } catch (const Failure& failure) {
    wrong_ = failure.what;
  }
  me().done = true;
  pause_();
}

static void begin_(int first, int cluster) {
  const size_t stack = 1 << 17;
  memset(memory_, 0xff, u64(PROGRAM) * cluster);  // NaN
  barriers_.clear(), flying_.clear();
  cluster_ = Meeting();
  programs_.assign(cluster, Program());
  threads_.resize(size_t(cluster) * width_);
  for (int i = 0; i < cluster; ++i) {
    programs_[i].block = first + i, programs_[i].starts = int(random_() % 300);
    programs_[i].warps.resize(width_ / 32);
  }
  for (size_t i = 0; i < threads_.size(); ++i) {
    Thread& t = threads_[i];
    if (!t.stack) t.stack = (char*)malloc(stack);
    t.done = false, t.index = int(i) % width_, t.program = int(i) / width_;
    t.open.clear(), t.committed.clear();
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack, t.context.uc_stack.ss_size = stack, t.context.uc_link = &scheduler_;
    makecontext(&t.context, entry_, 0);
  }
}

static void turn_(int turn) {  // of every thread, but for some
  land_some();
  for (size_t i = 0; i < threads_.size() && !wrong_; ++i) {
    if (threads_[i].done || turn < programs_[threads_[i].program].starts || random_() % 8 == 0) continue;
    now_ = int(i), threadIdx.x = threads_[i].index, blockIdx.x = program_().block;
    swapcontext(&scheduler_, &threads_[i].context);
  }
}

static bool all_ended_() {
  return std::all_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.done; });
}

static void end_(int shared) {
  if (!flying_.empty()) fail("copies come after the end");
  for (size_t i = 0; i < programs_.size(); ++i)
    for (u32 at = DYNAMIC + shared; at < PROGRAM; ++at)
      if (memory_[i * PROGRAM + at] != 0xff) fail("memory beyond its own was written");
}

// What went wrong, or null.
extern "C" const char* launch(const Args* args, int grid, int threads, int shared, int cluster, u64 seed) {
  given_ = args, wrong_ = nullptr, gridDim.x = grid, width_ = threads, seed_ = seed;
  if (!memory_) memory_ = (u8*)aligned_alloc(1024, u64(PROGRAM) * MOST);
  try {
    for (int first = 0; first < grid && !wrong_; first += cluster) {
      begin_(first, cluster);
      for (int turn = 0; !wrong_ && !all_ended_(); ++turn) {
        if (turn == 100000) fail("nothing moves any more");
        turn_(turn);
      }
      if (!wrong_) end_(shared);
    }
  } catch (const Failure& failure) {
    wrong_ = failure.what;
  }
  return wrong_;
}
