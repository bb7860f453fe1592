// out[share][row, column] = activation(x[row, K of the share] . w[column, K of the share] + bias[column]), any number of rows.
//
// A program makes a tile of 64 * GROUPS rows of x and WIDTH rows of w. Two warps ask the tensor memory accelerator for steps
// of 64 columns, one of x and one of w: one for both took a third longer. GROUPS groups of four warps multiply 64 rows each
// by all WIDTH; or DEPTH times as many, of which each takes every DEPTH-th step: products that follow each other into the
// same sums take 60 clocks each, however narrow they are. Weights, which no kernel writes, are on their way while the kernel
// before still runs. With GLU a tile's weight rows are WIDTH / 2 of the gate and WIDTH / 2 of up, whose product never leaves
// the registers.
//
// Fixed at compile time: GROUPS, WIDTH, DEPTH, STAGES, BIAS, GLU, ACTIVATION (0 none, 1 GELU in its tanh form, 2 SiLU, 3 ReLU).
// `multiply`, one wgmma of 64 x WIDTH x 16, is written by rings.py: its operands are as many as WIDTH / 2 registers.

#define ROWS (64 * GROUPS)
#define X_BYTES (ROWS * 128)  // of a step
#define W_BYTES (WIDTH * 128)
#define PARTS (GLU ? 2 : 1)   // boxes of weights a step
#define OUT (WIDTH / PARTS)   // columns of the result
#define PITCH (OUT * 2 + 16)  // bytes between its rows on their way out: eight rows lie in different banks
#define RINGS (STAGES * (X_BYTES + W_BYTES))
#define SUMS (WIDTH / 2)  // of a thread
static_assert(OUT % 8 == 0, "the swizzle is by eight rows");
static_assert(ROWS * PITCH <= RINGS, "the result leaves through the rings' memory");
static_assert((DEPTH - 1) * GROUPS * 128 * SUMS * 4 <= RINGS, "sums meet there");
static_assert(STAGES >= 2 * DEPTH, "a step is multiplied while the next arrives");
// A barrier's parity tells two turns apart, not three: who waits at it must have seen the turn before.
static_assert(STAGES % DEPTH == 0, "a place is always the same group's");

struct Args {
  TensorMap x, w;
  const bf16* bias;
  bf16* out;
  int rows;
  int columns;      // of the result
  int steps;        // of 64 columns of x
  int share_steps;  // of one share
  int row_tiles;
  int column_tiles;
  int x_bytes;  // of a step of rows: fewer rows than a place holds, where there are fewer
  int dependent;
};

DEVICE float activated(float v) {
#if ACTIVATION == 1
  return gelu_tanh(v);
#elif ACTIVATION == 2
  return __fdividef(v, 1.f + __expf(-v));
#elif ACTIVATION == 3
  return fmaxf(v, 0.f);
#else
  return v;
#endif
}

// A program's tile: its share, steps, and its first row and column.
struct Tile {
  int share, first, steps, row, column;

  MEMBER explicit Tile(const Args& p) {
    row = blockIdx.x % p.row_tiles * ROWS;
    column = blockIdx.x / p.row_tiles % p.column_tiles * OUT;
    share = blockIdx.x / p.row_tiles / p.column_tiles;
    first = share * p.share_steps;
    steps = min(p.share_steps, p.steps - first);
  }
};

// A place in the rings; `turn` changes every time around. Counted, since a division a step is long.
template <int STRIDE>
struct Place {
  u32 slot, turn = 0;

  MEMBER explicit Place(u32 first) : slot(first) {}
  MEMBER void next() {
    slot += STRIDE;
    if (slot >= STAGES) slot -= STAGES, turn ^= 1;
  }
};

DEVICE void load_weights(const Args& p, const Tile& tile, u32 ring, u32 full, u32 empty) {
  const u64 once = read_once_policy();
  Place<1> at(0);
  for (int s = 0; s < tile.steps; ++s, at.next()) {
    const u32 bar = full + at.slot * 8;
    barrier_wait(empty + at.slot * 8, at.turn ^ 1);  // a new barrier's turn before the first is over
    barrier_expect(bar, W_BYTES);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      box(ring + at.slot * W_BYTES + part * OUT * 128, &p.w, (tile.first + s) * 64, part * p.columns + tile.column, bar, once);
  }
}

DEVICE void load_rows(const Args& p, const Tile& tile, u32 ring, u32 full, u32 empty) {
  const u64 often = read_often_policy();
  if (p.dependent) wait_for_producer();
  Place<1> at(0);
  for (int s = 0; s < tile.steps; ++s, at.next()) {
    const u32 bar = full + at.slot * 8;
    barrier_wait(empty + at.slot * 8, at.turn ^ 1);
    barrier_expect(bar, p.x_bytes);
    box(ring + at.slot * X_BYTES, &p.x, (tile.first + s) * 64, tile.row, bar, often);
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
}

extern "C" __global__ void __launch_bounds__(GROUPS * DEPTH * 128 + 64) rings(const __grid_constant__ Args p) {
  DYNAMIC_SHARED(memory);
  SHARED(u64, barriers, 2 * STAGES);
  const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + STAGES * X_BYTES;
  const u32 full = shared_address(barriers), empty = full + STAGES * 8;
  const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;

  if (p.dependent) release_successor();
  if (threadIdx.x == GROUPS * DEPTH * 128) fetch_map(&p.w), fetch_map(&p.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + i * 8, 2), barrier_init(empty + i * 8, GROUPS * 4);
    barrier_init_fence();
  }
  __syncthreads();
  const Tile tile(p);

  if (warp >= GROUPS * DEPTH * 4) {
    if (lane > 0) return;
    if (warp == GROUPS * DEPTH * 4)
      load_weights(p, tile, w_ring, full, empty);
    else
      load_rows(p, tile, x_ring, full, empty);
    return;
  }
  const int group = warp / 4, rows = group % GROUPS * 64, depth = group / GROUPS;
  const Biases bias(p, tile.column, lane);
  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
  Place<DEPTH> at(depth), read(depth);
  for (int s = depth; s < tile.steps; s += DEPTH, at.next()) {
    barrier_wait(full + at.slot * 8, at.turn);
    const u64 x = descriptor(x_ring + at.slot * X_BYTES + rows * 128), w = descriptor(w_ring + at.slot * W_BYTES);
    products_begin();  // in every step: without it the compiler waits for each product
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(sums, x + 2 * k, w + 2 * k);
    products_commit();
    products_wait<1>(sums);
    if (s < DEPTH) continue;
    if (lane == 0) tell(empty + read.slot * 8);
    read.next();
  }
  products_wait<0>(sums);
  if (p.dependent) wait_for_producer();    // which may still read what is written here
  groups_sync(GROUPS * DEPTH * 128);       // no group reads the rings any more
  if (DEPTH > 1 && !gathered(sums, x_ring, group, threadIdx.x % 128)) return;
  delay_stores();
  store(p, sums, bias, x_ring + rows * PITCH, tile.row + rows, tile.column, tile.share, warp % 4, lane);
}
