// out[share][row, column] = activation(x[row, K of the share] . w[column, K of the share] + bias[column]), any number of rows.
//
// A program makes tiles of 64 * GROUPS rows of x and WIDTH rows of w: one, or several after each other. Two warps ask the
// tensor memory accelerator for steps of 64 columns, one of x and one of w: one for both took a third longer. GROUPS groups
// of four warps multiply 64 rows each by all WIDTH; or DEPTH times as many, of which each takes every DEPTH-th step:
// products that follow each other into the same sums take 60 clocks each, however narrow they are. A cluster of DOWN x
// ACROSS programs shares what it loads: the same rows across, the same weights down. Rows and weights have rings of their
// own, so that many steps of weights, which no kernel writes, are on their way while the kernel before still runs. With GLU
// a tile's weight rows are WIDTH / 2 of the gate and WIDTH / 2 of up, whose product never leaves the registers.
//
// Fixed at compile time: GROUPS, WIDTH, DOWN, ACROSS, DEPTH, X_STAGES, W_STAGES, LOOP (several tiles a program), BIAS, GLU,
// ACTIVATION (0 none, 1 GELU in its tanh form, 2 SiLU). `multiply`, one wgmma of 64 x WIDTH x 16, is written by rings.py: its
// operands are as many as WIDTH / 2 registers.

#define ROWS (64 * GROUPS)
#define CLUSTER (DOWN * ACROSS)
#define X_BYTES (ROWS * 128)  // of a step
#define W_BYTES (WIDTH * 128)
#define PARTS (GLU ? 2 : 1)                // boxes of weights a step
#define OUT (WIDTH / PARTS)                // columns of the result
#define PITCH (OUT * 2 + 16)               // bytes between its rows on their way out: eight rows lie in different banks
#define W_BOX (WIDTH / PARTS / DOWN)       // rows that one program of a column asks for
#define X_BOX (ROWS / ACROSS)              // rows that one program of a row asks for
static_assert(W_BOX % 8 == 0 && X_BOX % 8 == 0, "the swizzle is by eight rows");
#define RINGS (X_STAGES * X_BYTES + W_STAGES * W_BYTES)
static_assert(LOOP || ROWS * PITCH <= RINGS, "the result of a single tile leaves through the rings' memory");
#define SUMS (WIDTH / 2)                   // of a thread
static_assert(X_STAGES >= 2 * DEPTH && W_STAGES >= X_STAGES, "a ring holds what is multiplied; weights are never behind");
// A barrier's parity tells two turns apart, not three: who waits at it must have seen the turn before.
static_assert(X_STAGES % DEPTH == 0 && W_STAGES % DEPTH == 0, "a place is always the same group's");
static_assert(DEPTH == 1 || (!LOOP && (DEPTH - 1) * GROUPS * 128 * SUMS * 4 <= RINGS), "sums meet in the rings' memory");

struct Args {
  TensorMap x, w;
  const bf16* bias;
  bf16* out;
  int rows;
  int columns;      // of the result
  int steps;        // of 64 columns of x
  int share_steps;  // of one share
  int row_tiles;    // of clusters
  int column_tiles;
  int tiles;  // of clusters, shares counted
  int dependent;
};

DEVICE float activated(float v) {
#if ACTIVATION == 1
  return gelu_tanh(v);
#elif ACTIVATION == 2
  return __fdividef(v, 1.f + __expf(-v));
#else
  return v;
#endif
}

// A tile of a program's cluster: its share, steps, and the first row and column of this program.
struct Tile {
  int index, share, first, steps, row, column;

  MEMBER Tile(const Args& p, int down, int across) : index(blockIdx.x / CLUSTER) { begin(p, down, across); }
  MEMBER void begin(const Args& p, int down, int across) {
    row = (index % p.row_tiles * DOWN + down) * ROWS;
    column = (index / p.row_tiles % p.column_tiles * ACROSS + across) * OUT;
    share = index / p.row_tiles / p.column_tiles;
    first = share * p.share_steps;
    steps = min(p.share_steps, p.steps - first);
  }
  MEMBER bool there(const Args& p) const { return index < p.tiles; }
  MEMBER void next(const Args& p, int down, int across) {
    index += gridDim.x / CLUSTER;
    begin(p, down, across);
  }
};

// A place in a ring of STAGES; `turn` changes every time around. Counted, since a division a step is long.
template <int STAGES, int STRIDE>
struct Place {
  u32 slot, turn = 0;

  MEMBER explicit Place(u32 first) : slot(first) {}
  MEMBER void next() {
    slot += STRIDE;
    if (slot >= STAGES) slot -= STAGES, turn ^= 1;
  }
};

DEVICE void load_weights(const Args& p, u32 ring, u32 full, int down, int across) {
  const u32 empty = full + W_STAGES * 8;
  const u64 once = read_once_policy();
  u32 mates = 0;
#pragma unroll
  for (int i = 0; i < DOWN; ++i) mates |= 1u << (i * ACROSS + across);
  Place<W_STAGES, 1> at(0);
  for (Tile tile(p, down, across); tile.there(p); tile.next(p, down, across))
    for (int s = 0; s < tile.steps; ++s, at.next()) {
      const u32 bar = full + at.slot * 8;
      barrier_wait(empty + at.slot * 8, at.turn ^ 1);  // a new barrier's turn before the first is over
      barrier_expect(bar, W_BYTES);
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        box(ring + at.slot * W_BYTES + (part * OUT + down * W_BOX) * 128, &p.w, (tile.first + s) * 64,
            part * p.columns + tile.column + down * W_BOX, bar, once, mates, DOWN > 1);
    }
}

DEVICE void load_rows(const Args& p, u32 ring, u32 full, int down, int across) {
  const u32 empty = full + X_STAGES * 8;
  const u64 often = read_often_policy();
  u32 mates = 0;
#pragma unroll
  for (int i = 0; i < ACROSS; ++i) mates |= 1u << (down * ACROSS + i);
  if (p.dependent) wait_for_producer();
  Place<X_STAGES, 1> at(0);
  for (Tile tile(p, down, across); tile.there(p); tile.next(p, down, across))
    for (int s = 0; s < tile.steps; ++s, at.next()) {
      const u32 bar = full + at.slot * 8;
      barrier_wait(empty + at.slot * 8, at.turn ^ 1);
      barrier_expect(bar, X_BYTES);
      box(ring + at.slot * X_BYTES + across * X_BOX * 128, &p.x, (tile.first + s) * 64, tile.row + across * X_BOX, bar, often,
          mates, ACROSS > 1);
    }
}

// The bias of a thread's columns, two neighbours a word: read before anything is waited for.
struct Biases {
  u32 pair[BIAS ? OUT / 8 : 1];

  MEMBER Biases(const Args& p, int column, int lane) {
#pragma unroll
    for (int n = 0; n < (BIAS ? OUT / 8 : 0); ++n) {
      const int at = column + n * 8 + lane % 4 * 2;
      pair[n] = at < p.columns ? __ldg((const u32*)(p.bias + at)) : 0;
    }
  }
};

// Groups that took other steps leave their sums in `memory`; the first adds them. Returns whether this is the first.
DEVICE bool gathered(float (&sums)[SUMS], u32 memory, int group, int thread) {
  const int depth = group / GROUPS;
  const u32 mine = memory + (group % GROUPS * 128 + thread) * 4;
  if (depth > 0)
#pragma unroll
    for (int i = 0; i < SUMS; ++i) store_shared(mine + ((depth - 1) * SUMS + i) * GROUPS * 512, __float_as_uint(sums[i]));
  groups_sync(GROUPS * DEPTH * 128);
  if (depth > 0) return false;
#pragma unroll
  for (int other = 0; other < DEPTH - 1; ++other)
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] += load_shared_float(mine + (other * SUMS + i) * GROUPS * 512);
  groups_sync_of_first(GROUPS * 128);  // before the result takes this place
  return true;
}

// 64 rows of the result: bias, activation or gated unit, then by whole lines of 16 bytes through shared memory.
DEVICE void store(const Args& p, const float (&sums)[SUMS], const Biases& bias, u32 memory, int row, int column, int share,
                  int warp, int lane) {
  const u32 corner = memory + (warp * 16 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < OUT / 8; ++n) {
    float4 v = make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]);
    if (BIAS) {
      const float even = low(bias.pair[n]), odd = high(bias.pair[n]);
      v = make_float4(v.x + even, v.y + odd, v.z + even, v.w + odd);
    }
    v = make_float4(activated(v.x), activated(v.y), activated(v.z), activated(v.w));
#if GLU
    const int up = WIDTH / 4 + 4 * n;
    v = make_float4(v.x * sums[up], v.y * sums[up + 1], v.z * sums[up + 2], v.w * sums[up + 3]);
#endif
    store_shared(corner + n * 16, pack2(v.x, v.y));
    store_shared(corner + n * 16 + 8 * PITCH, pack2(v.z, v.w));
  }
  __syncwarp();  // sixteen rows are this warp's own
  bf16* out = p.out + (u64)share * p.rows * p.columns;
  for (int i = lane; i < 16 * (OUT / 8); i += 32) {
    const int r = warp * 16 + i / (OUT / 8), c = i % (OUT / 8) * 8;
    const uint4 v = load_shared(memory + r * PITCH + c * 2);
    if (row + r < p.rows && column + c < p.columns) *(uint4*)(out + (u64)(row + r) * p.columns + column + c) = v;
  }
  __syncwarp();  // the next tile takes their place
}

extern "C" __global__ void __launch_bounds__(GROUPS * DEPTH * 128 + 64) rings(const __grid_constant__ Args p) {
  DYNAMIC_SHARED(memory);
  SHARED(u64, barriers, 2 * (X_STAGES + W_STAGES));
  const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + X_STAGES * X_BYTES;
  const u32 x_full = shared_address(barriers), x_empty = x_full + X_STAGES * 8;
  const u32 w_full = x_empty + X_STAGES * 8, w_empty = w_full + W_STAGES * 8;
  const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
  const int rank = blockIdx.x % CLUSTER, down = rank / ACROSS, across = rank % ACROSS;

  if (p.dependent) release_successor();
  if (threadIdx.x == GROUPS * DEPTH * 128) fetch_map(&p.w), fetch_map(&p.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) barrier_init(x_full + i * 8, 1), barrier_init(x_empty + i * 8, GROUPS * 4 * ACROSS);
    for (int i = 0; i < W_STAGES; ++i) barrier_init(w_full + i * 8, 1), barrier_init(w_empty + i * 8, GROUPS * 4 * DOWN);
    barrier_init_fence();
  }
  cluster_sync(CLUSTER > 1);

  if (warp == GROUPS * DEPTH * 4) {
    if (lane == 0) load_weights(p, w_ring, w_full, down, across);
    __syncwarp();
  } else if (warp == GROUPS * DEPTH * 4 + 1) {
    if (lane == 0) load_rows(p, x_ring, x_full, down, across);
    __syncwarp();
  } else {
    const int group = warp / 4, rows = group % GROUPS * 64, depth = group / GROUPS;
    const u32 leaving = x_ring + (LOOP ? RINGS : 0) + rows * PITCH;
    Place<X_STAGES, DEPTH> x_at(depth), x_read(depth);
    Place<W_STAGES, DEPTH> w_at(depth), w_read(depth);
    auto told = [&]() {  // the rows and weights of a step are read
      if (lane < ACROSS) tell(x_empty + x_read.slot * 8, down * ACROSS + lane, CLUSTER > 1);
      if (lane < DOWN) tell(w_empty + w_read.slot * 8, lane * ACROSS + across, CLUSTER > 1);
      x_read.next(), w_read.next();
    };
    for (Tile tile(p, down, across); tile.there(p); tile.next(p, down, across)) {
      const Biases bias(p, tile.column, lane);
      float sums[SUMS];
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
      for (int s = depth; s < tile.steps; s += DEPTH) {
        barrier_wait(w_full + w_at.slot * 8, w_at.turn);
        barrier_wait(x_full + x_at.slot * 8, x_at.turn);
        const u64 x = descriptor(x_ring + x_at.slot * X_BYTES + rows * 128), w = descriptor(w_ring + w_at.slot * W_BYTES);
        products_begin();  // in every step: without it the compiler waits for each product
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(sums, x + 2 * k, w + 2 * k);
        products_commit();
        products_wait<1>(sums);
        if (s >= DEPTH) told();
        x_at.next(), w_at.next();
      }
      products_wait<0>(sums);
      if (LOOP) told();
      if (p.dependent) wait_for_producer();  // which may still read what is written here
      if (!LOOP) groups_sync(GROUPS * DEPTH * 128);  // no group reads the rings any more
      if (DEPTH > 1 && !gathered(sums, x_ring, group, threadIdx.x % 128)) break;
      delay_stores();
      store(p, sums, bias, leaving, tile.row + rows, tile.column, tile.share, warp % 4, lane);
    }
  }
  if (CLUSTER > 1) cluster_sync(true);  // nobody may still tell a program that has ended
}
