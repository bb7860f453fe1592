// The two ends of an Euler step, one program a token: hidden -> norm -> action velocity -> state -> first residual row.
// Fixed at compile time: K (width), A (action width, at most 32), HAS_OUT, HAS_IN, SILU (of what goes in), GUIDED,
// MODULATION_FLOAT.
#define THREADS 1024

struct Args {
  const bf16* x;
  const void* scale;
  const void* shift;
  const float* weight_out;  // [A, K]
  const float* bias_out;
  const float* weight_in;  // [K, A]
  const float* bias_in;
  const float* state;  // [rows, A]
  float* next_state;
  const float* previous;  // [rows, A], what real-time chunking pulls to
  const float* guidance;  // [rows], how hard
  const int* prefix;  // [entries], how many of an entry's first rows `previous` gives
  bf16* out;     // [rows, K]
  float eps;
  float dt;
  float gain;
  float time;
  int row_tokens;  // of one entry
};

extern "C" __global__ void __launch_bounds__(THREADS) step(const __grid_constant__ Args p) {
  SHARED(float, state, 32);
#if HAS_IN
  DYNAMIC_SHARED(memory);  // weight_in
  SHARED(u64, barrier, 1);
#endif
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const u64 token = blockIdx.x;
  release_successor();
#if HAS_IN
  if (tid == 0) {
    barrier_init(shared_address(barrier), 1);
    barrier_init_fence();
    barrier_expect(shared_address(barrier), K * A * 4);
    bulk_copy(shared_address(memory), p.weight_in, K * A * 4, shared_address(barrier));
  }
#endif
#if HAS_OUT
  float w[K / 32];
#pragma unroll
  for (int i = 0; i < K / 32; i += 2) {
    float2 v = make_float2(0.f, 0.f);
    if (warp < A) v = __ldg((const float2*)(p.weight_out + (u64)warp * K + i * 32 + lane * 2));
    w[i] = v.x * (1.0f + modulation(p.scale, i * 32 + lane * 2));
    w[i + 1] = v.y * (1.0f + modulation(p.scale, i * 32 + lane * 2 + 1));
  }
  float moved = 0.f;
  if (p.shift && warp < A) {
#pragma unroll
    for (int i = 0; i < K / 32; i += 2) {
      float2 v = __ldg((const float2*)(p.weight_out + (u64)warp * K + i * 32 + lane * 2));
      moved += v.x * modulation(p.shift, i * 32 + lane * 2) + v.y * modulation(p.shift, i * 32 + lane * 2 + 1);
    }
  }
#if GUIDED
  const bool given = (int)(token % p.row_tokens) < (int)load_fresh_word(p.prefix + token / p.row_tokens);
#endif
  wait_for_producer();
  u32 x[K / 64];
#pragma unroll
  for (int i = 0; i < K / 64; ++i) x[i] = load_fresh_word(p.x + token * K + i * 64 + lane * 2);
  float squares = 0.f, dot = 0.f;
#pragma unroll
  for (int i = 0; i < K / 64; ++i) {
    float lo = low(x[i]), hi = high(x[i]);
    squares += lo * lo + hi * hi;
    dot += lo * w[2 * i] + hi * w[2 * i + 1];
  }
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) {
    squares += __shfl_xor_sync(0xffffffffu, squares, d);
    dot += __shfl_xor_sync(0xffffffffu, dot, d);
    moved += __shfl_xor_sync(0xffffffffu, moved, d);
  }
  if (lane == 0 && warp < A) {
    float velocity = dot * rsqrtf(squares * (1.0f / K) + p.eps) + moved + __ldg(p.bias_out + warp);
    float at = __ldcg(p.state + token * A + warp);
    float next = at + p.dt * velocity;
#if GUIDED
    float ahead = at - p.time * velocity;  // the chunk that this step foresees
    const float previous = __ldg(p.previous + token * A + warp);
    next -= p.dt * p.gain * __ldg(p.guidance + token) * (previous - ahead);
    if (given) next = previous;
#endif
    delay_stores();
    p.next_state[token * A + warp] = next;
    state[warp] = next;
  }
#else
  wait_for_producer();
  if (tid < A) state[tid] = __ldcg(p.state + token * A + tid);
#endif
#if HAS_IN
  __syncthreads();
  barrier_wait(shared_address(barrier), 0);
  delay_stores();
  for (int f = tid; f < K; f += THREADS) {
    float sum = __ldg(p.bias_in + f);
    const float* row = (const float*)memory + f * A;
#pragma unroll
    for (int i = 0; i < A; ++i) {
      int at = (i + lane) % A;  // each lane begins at its own bank
      sum += state[at] * row[at];
    }
#if SILU
    sum = __fdividef(sum, 1.f + __expf(-sum));
#endif
    float other = __shfl_xor_sync(0xffffffffu, sum, 1);
    if (!(lane & 1)) *(u32*)(p.out + token * K + f) = pack2(sum, other);
  }
#endif
}
