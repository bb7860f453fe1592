// out[share][row, column] = activation(x[row, K of the share] . w[column, K of the share] + bias[column]), any number of rows.
//
// One program a tile of 64 * GROUPS rows of x and WIDTH rows of w. One warp asks the tensor memory accelerator for steps of
// 64 columns of both, GROUPS groups of four warps multiply 64 rows each by all WIDTH. A cluster of DOWN x ACROSS programs
// shares what it loads: the same rows across, the same weights down. Rows and weights have rings of their own, so that many
// steps of weights, which no kernel writes, are on their way while the kernel before still runs. With GLU a tile's weight
// rows are WIDTH / 2 of the gate and WIDTH / 2 of up, whose product never leaves the registers. Fixed at compile time: GROUPS,
// WIDTH, DOWN, ACROSS, X_STAGES, W_STAGES, GLU, ACTIVATION (0 none, 1 GELU in its tanh form, 2 SiLU). `multiply`, one wgmma
// of 64 x WIDTH x 16, is written by rings.py: its operands are as many as WIDTH / 2 registers.

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
static_assert(ROWS * PITCH <= X_STAGES * X_BYTES + W_STAGES * W_BYTES, "the result leaves through the rings' memory");
static_assert(W_STAGES >= X_STAGES, "weights are never behind");

struct alignas(64) TensorMap {
  u8 bytes[128];
};

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
  int dependent;
};

DEVICE void tell(u32 bar, u32 rank) {  // a program of the cluster: arrives on its barrier at this address
  if (CLUSTER == 1)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
  else
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_address(bar, rank)) : "memory");
}

DEVICE void cluster_barrier_wait(u32 bar, u32 parity) {  // as barrier_wait, where programs of the whole cluster arrive
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
      "bra again;\ndone:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// A box of 64 columns from `column` and of rows from `row`, to this program or to all of `mates`.
DEVICE void box(u32 to, const TensorMap* map, int column, int row, u32 bar, u64 policy, u32 mates, bool many) {
  if (many)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
        "[%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
        "l"(map), "r"(bar), "r"(column), "r"(row), "h"((unsigned short)mates), "l"(policy)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(to),
        "l"(map), "r"(bar), "r"(column), "r"(row), "l"(policy)
        : "memory");
}

DEVICE void all_of_cluster() {
  if (CLUSTER == 1) {
    __syncthreads();
  } else {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    cluster_wait();
  }
}

// What wgmma reads: rows of 128 bytes, swizzled over 128, eight rows every 1,024 (PTX ISA, matrix descriptor).
DEVICE u64 descriptor(u32 at) { return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

DEVICE float activated(float v) {
#if ACTIVATION == 1
  return gelu_tanh(v);
#elif ACTIVATION == 2
  return __fdividef(v, 1.f + __expf(-v));
#else
  return v;
#endif
}

// The program that asks for everything.
DEVICE void load(const Args& p, u32 x_ring, u32 w_ring, u32 x_full, u32 w_full, int row_tile, int column_tile, int down, int across,
                 int first, int steps) {
  const u32 x_empty = x_full + X_STAGES * 8, w_empty = w_full + W_STAGES * 8;
  const u64 once = read_once_policy();
  u64 often;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
  u32 row_mates = 0, column_mates = 0;
#pragma unroll
  for (int i = 0; i < ACROSS; ++i) row_mates |= 1u << (down * ACROSS + i);
#pragma unroll
  for (int i = 0; i < DOWN; ++i) column_mates |= 1u << (i * ACROSS + across);
  auto weights = [&](int s) {
    const u32 slot = s % W_STAGES, bar = w_full + slot * 8;
    if (s >= W_STAGES) cluster_barrier_wait(w_empty + slot * 8, (s / W_STAGES - 1) & 1);
    barrier_expect(bar, W_BYTES);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      box(w_ring + slot * W_BYTES + (part * OUT + down * W_BOX) * 128, &p.w, (first + s) * 64,
          part * p.columns + column_tile * OUT + down * W_BOX, bar, once, column_mates, DOWN > 1);
  };
  auto rows = [&](int s) {
    const u32 slot = s % X_STAGES, bar = x_full + slot * 8;
    if (s >= X_STAGES) cluster_barrier_wait(x_empty + slot * 8, (s / X_STAGES - 1) & 1);
    barrier_expect(bar, X_BYTES);
    box(x_ring + slot * X_BYTES + across * X_BOX * 128, &p.x, (first + s) * 64, row_tile * ROWS + across * X_BOX, bar, often,
        row_mates, ACROSS > 1);
  };
  for (int s = 0; s < W_STAGES && s < steps; ++s) weights(s);
  if (p.dependent) wait_for_producer();
  for (int s = 0; s < steps; ++s) {
    rows(s);
    const int next = s - X_STAGES + W_STAGES;  // its place is free once that of these rows was
    if (s >= X_STAGES && next < steps) weights(next);
  }
}

// 64 rows of the result: bias, activation or gated unit, then by whole lines of 16 bytes through shared memory.
DEVICE void store(const Args& p, const float (&sums)[WIDTH / 2], u32 memory, int row, int column, int share, int warp, int lane) {
  const u32 corner = memory + (warp * 16 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < OUT / 8; ++n) {
    float4 v = make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]);
    const int at = column + n * 8 + lane % 4 * 2;
    if (p.bias && at < p.columns) {
      const float even = bias_of(p.bias, at), odd = bias_of(p.bias, at + 1);
      v = make_float4(v.x + even, v.y + odd, v.z + even, v.w + odd);
    }
    v = make_float4(activated(v.x), activated(v.y), activated(v.z), activated(v.w));
#if GLU
    const int up = WIDTH / 4 + 4 * n;
    v = make_float4(v.x * sums[up], v.y * sums[up + 1], v.z * sums[up + 2], v.w * sums[up + 3]);
#endif
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(corner + n * 16), "r"(pack2(v.x, v.y)) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(corner + n * 16 + 8 * PITCH), "r"(pack2(v.z, v.w)) : "memory");
  }
  __syncwarp();  // sixteen rows are this warp's own
  bf16* out = p.out + (u64)share * p.rows * p.columns;
  for (int i = lane; i < 16 * (OUT / 8); i += 32) {
    const int r = warp * 16 + i / (OUT / 8), c = i % (OUT / 8) * 8;
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(memory + r * PITCH + c * 2)
                 : "memory");
    if (row + r < p.rows && column + c < p.columns) *(uint4*)(out + (u64)(row + r) * p.columns + column + c) = v;
  }
}

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32) rings(const __grid_constant__ Args p) {
  extern __shared__ u8 memory[];
  __shared__ alignas(8) u64 barriers[2 * (X_STAGES + W_STAGES)];
  const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + X_STAGES * X_BYTES;
  const u32 x_full = shared_address(barriers), x_empty = x_full + X_STAGES * 8;
  const u32 w_full = x_empty + X_STAGES * 8, w_empty = w_full + W_STAGES * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = blockIdx.x % CLUSTER, down = rank / ACROSS, across = rank % ACROSS, cluster = blockIdx.x / CLUSTER;
  const int row_tile = cluster % p.row_tiles * DOWN + down;
  const int column_tile = cluster / p.row_tiles % p.column_tiles * ACROSS + across;
  const int share = cluster / p.row_tiles / p.column_tiles;
  const int first = share * p.share_steps, steps = min(p.share_steps, p.steps - first);

  if (p.dependent) release_successor();
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) barrier_init(x_full + i * 8, 1), barrier_init(x_empty + i * 8, GROUPS * 4 * ACROSS);
    for (int i = 0; i < W_STAGES; ++i) barrier_init(w_full + i * 8, 1), barrier_init(w_empty + i * 8, GROUPS * 4 * DOWN);
    barrier_init_fence();
  }
  all_of_cluster();

  if (warp == GROUPS * 4) {
    if (lane == 0) load(p, x_ring, w_ring, x_full, w_full, row_tile, column_tile, down, across, first, steps);
    __syncwarp();
  } else {
    const int group = warp / 4;
    float sums[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sums[i] = 0.f;
    for (int s = 0; s < steps; ++s) {
      const int x_slot = s % X_STAGES, w_slot = s % W_STAGES;
      cluster_barrier_wait(w_full + w_slot * 8, s / W_STAGES & 1);
      cluster_barrier_wait(x_full + x_slot * 8, s / X_STAGES & 1);
      const u64 x = descriptor(x_ring + x_slot * X_BYTES + group * 8192), w = descriptor(w_ring + w_slot * W_BYTES);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply(sums, x + 2 * k, w + 2 * k);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (s == 0) continue;  // the step before is read
      if (lane < ACROSS) tell(x_empty + (s - 1) % X_STAGES * 8, down * ACROSS + lane);
      if (lane < DOWN) tell(w_empty + (s - 1) % W_STAGES * 8, lane * ACROSS + across);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // none is read before
    if (p.dependent) wait_for_producer();  // which may still read what is written here
    asm volatile("bar.sync 1, %0;" ::"r"(GROUPS * 128) : "memory");  // no group reads the rings any more
    delay_stores();
    store(p, sums, x_ring + group * 64 * PITCH, row_tile * ROWS + group * 64, column_tile * OUT, share, warp % 4, lane);
  }
  if (CLUSTER > 1) all_of_cluster();  // nobody may still tell a program that has ended
}
