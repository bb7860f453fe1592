// Attention of few query rows over many keys. A cluster of 8 programs serves one head of one batch entry: each takes CHUNK
// keys, then 32 of the 256 output features. Fixed at compile time: NT (8-token tiles of the query), CHUNK (multiple of 16), RESIDENT.
#define HEAD_DIM 256
#define PARTS 8
#define THREADS 256
#define TOKENS (NT * 8)
#define K_STRIDE 576  // bytes; two rows a quarter-warp reads fall into different halves of the banks
#define V_STRIDE 528  // bytes; eight rows that ldmatrix reads fall into different banks
#define S_STRIDE (CHUNK + 4)
#define INFINITY __int_as_float(0x7f800000)

struct Args {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  const int* key_valid;
  bf16* out;
  u64 batch_stride;  // of k and v, in elements
  u64 row_stride;
  int tokens;
  int keys;
  int start;  // rows from here on are written by the kernel before this one
  int heads;
  int kv_heads;
  float scale;  // times log2(e)
};

DEVICE uint4 load_transposed(u32 a) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}

DEVICE void scores(const Args& p, const bf16* q, const u8* keys, float* s, const u8* valid, int warp, int lane) {
  const int r = lane >> 2, j = lane & 3;
#pragma unroll
  for (int n0 = 0; n0 < NT; n0 += 2) {
    constexpr int WIDE = NT > 1 ? 2 : 1;
    uint4 x[8][WIDE];
#pragma unroll
    for (int b = 0; b < 8; ++b) {
#pragma unroll
      for (int n = 0; n < WIDE; ++n) {
        int token = (n0 + n) * 8 + r;
        x[b][n] = make_uint4(0, 0, 0, 0);
        if (token < p.tokens) x[b][n] = load_fresh(q + (u64)token * p.heads * HEAD_DIM + b * 32 + j * 8);
      }
    }
    for (int tile = warp; tile < CHUNK / 16; tile += THREADS / 32) {
      float4 acc[2][WIDE];
#pragma unroll
      for (int n = 0; n < WIDE; ++n) acc[0][n] = acc[1][n] = make_float4(0.f, 0.f, 0.f, 0.f);
      u32 at = shared_address(keys) + (tile * 16 + r) * K_STRIDE + j * 16;
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        uint4 lo = load_shared(at + b * 64), hi = load_shared(at + 8 * K_STRIDE + b * 64);
#pragma unroll
        for (int n = 0; n < WIDE; ++n) {
          mma(acc[0][n], make_uint4(lo.x, hi.x, lo.y, hi.y), x[b][n].x, x[b][n].y);
          mma(acc[1][n], make_uint4(lo.z, hi.z, lo.w, hi.w), x[b][n].z, x[b][n].w);
        }
      }
      int key = tile * 16 + r;
      bool low_key = valid[key], high_key = valid[key + 8];
#pragma unroll
      for (int n = 0; n < WIDE; ++n) {
        if (n0 + n >= NT) break;
        float* to = s + ((n0 + n) * 8 + j * 2) * S_STRIDE + key;
        to[0] = low_key ? (acc[0][n].x + acc[1][n].x) * p.scale : -INFINITY;
        to[S_STRIDE] = low_key ? (acc[0][n].y + acc[1][n].y) * p.scale : -INFINITY;
        to[8] = high_key ? (acc[0][n].z + acc[1][n].z) * p.scale : -INFINITY;
        to[S_STRIDE + 8] = high_key ? (acc[0][n].w + acc[1][n].w) * p.scale : -INFINITY;
      }
    }
  }
}

// One warp a token: exp2(s - max) in bf16 over the row itself; (max, sum) goes to every program of the cluster.
DEVICE void soften(float* s, u32 extremes, int part, int warp, int lane) {
  for (int token = warp; token < TOKENS; token += THREADS / 32) {
    float* row = s + token * S_STRIDE;
    constexpr int EACH = (CHUNK + 31) / 32;
    float v[EACH];
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      v[i] = i * 32 + lane < CHUNK ? row[i * 32 + lane] : -INFINITY;
      top = fmaxf(top, v[i]);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      v[i] = v[i] == -INFINITY ? 0.f : exp2f(v[i] - top);
      sum += v[i];
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (i * 32 + lane < CHUNK) ((bf16*)row)[i * 32 + lane] = (bf16)(pack2(v[i], 0.f) & 0xffffu);
    if (lane < PARTS)
      store_peer(peer_address(extremes + (part * TOKENS + token) * 8, lane), make_float2(top, sum));
  }
}

// out^T[32 features of this warp x tokens], unnormalised, straight into the program that finishes these features.
DEVICE void mix(const u8* values, const float* s, u32 pushed, int part, int warp, int lane) {
  const int r = lane >> 2, j = lane & 3;
  float4 acc[2][NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) acc[0][n] = acc[1][n] = make_float4(0.f, 0.f, 0.f, 0.f);
  u32 at = shared_address(values) + ((lane >> 4) * 8 + (lane & 7)) * V_STRIDE + (warp * 32 + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll 2
  for (int k = 0; k < CHUNK; k += 16) {
    uint4 a0 = load_transposed(at + k * V_STRIDE), a1 = load_transposed(at + k * V_STRIDE + 32);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const u32* b = (const u32*)(s + (n * 8 + r) * S_STRIDE) + k / 2 + j;
      mma(acc[0][n], a0, b[0], b[4]);
      mma(acc[1][n], a1, b[0], b[4]);
    }
  }
  u32 to = peer_address(pushed + part * TOKENS * 128, warp);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float2 a = two_features(acc[m][n].x, acc[m][n].y, r & 1), b = two_features(acc[m][n].z, acc[m][n].w, r & 1);
      u32 row = to + (n * 8 + j * 2 + (r & 1)) * 128 + (m * 16 + (r & ~1)) * 4;
      store_peer(row, a);
      store_peer(row + 32, b);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(const __grid_constant__ Args p) {
  extern __shared__ __align__(128) u8 memory[];
  u8* keys = memory;
  u8* values = keys + CHUNK * K_STRIDE;
  float* s = (float*)(values + CHUNK * V_STRIDE);
  float* pushed = s + TOKENS * S_STRIDE;                      // [PARTS][TOKENS][32] from the cluster
  float2* extremes = (float2*)(pushed + PARTS * TOKENS * 32);  // [PARTS][TOKENS] max and sum
  u8* barriers = (u8*)(extremes + PARTS * TOKENS);
  u8* valid = barriers + 16;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int part = (int)cluster_rank(), group = blockIdx.x / PARTS;
  const int head = group % p.heads, batch = group / p.heads;
  const int key0 = part * CHUNK, key = key0 + tid;
  const u64 offset = (u64)batch * p.batch_stride + (u64)(head / (p.heads / p.kv_heads)) * HEAD_DIM;
  const u32 k_bar = shared_address(barriers), v_bar = k_bar + 8;

  release_successor();
  if (tid == 0) {
    barrier_init(k_bar, CHUNK);
    barrier_init(v_bar, CHUNK);
    barrier_init_fence();
  }
  bool mine = tid < CHUNK && key < p.keys && (!p.key_valid || __ldg(p.key_valid + (u64)batch * p.keys + key));
  if (tid < CHUNK) valid[tid] = mine;
  bool any = __syncthreads_or(mine);
  if (tid < CHUNK) {
    u32 k_row = shared_address(keys) + tid * K_STRIDE, v_row = shared_address(values) + tid * V_STRIDE;
    if (mine && key < p.start) {
      barrier_expect(k_bar, HEAD_DIM * 2);
      bulk_copy(k_row, p.k + offset + (u64)key * p.row_stride, HEAD_DIM * 2, k_bar);
      barrier_expect(v_bar, HEAD_DIM * 2);
      bulk_copy(v_row, p.v + offset + (u64)key * p.row_stride, HEAD_DIM * 2, v_bar);
    } else {
      barrier_arrive(k_bar);
      barrier_arrive(v_bar);
      if (!mine && any) {  // whatever lies there times a weight of 0 must be 0
        for (int i = 0; i < HEAD_DIM * 2; i += 16) {
          *(uint4*)(keys + tid * K_STRIDE + i) = make_uint4(0, 0, 0, 0);
          *(uint4*)(values + tid * V_STRIDE + i) = make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
  cluster_arrive();
  cluster_wait();
  wait_for_producer();

  const int fresh = max(p.start - key0, 0), end = min(CHUNK, p.keys - key0);
  for (int i = fresh * 64 + tid; i < end * 64; i += THREADS) {  // 32 pieces of a key row, 32 of a value row
    int row = i / 64, piece = i % 32;
    if (!valid[row]) continue;
    bool is_key = i % 64 < 32;
    uint4 w = load_fresh((is_key ? p.k : p.v) + offset + (u64)(key0 + row) * p.row_stride + piece * 8);
    *(uint4*)(is_key ? keys + row * K_STRIDE + piece * 16 : values + row * V_STRIDE + piece * 16) = w;
  }
  __syncthreads();
  if (any) {
    barrier_wait(k_bar, 0);
    scores(p, p.q + (u64)batch * p.tokens * p.heads * HEAD_DIM + head * HEAD_DIM, keys, s, valid, warp, lane);
    __syncthreads();
    soften(s, shared_address(extremes), part, warp, lane);
    __syncthreads();
    barrier_wait(v_bar, 0);
    mix(values, s, shared_address(pushed), part, warp, lane);
  } else {
    for (int i = tid; i < TOKENS * PARTS; i += THREADS)
      store_peer(peer_address(shared_address(extremes + part * TOKENS + i / PARTS), i % PARTS), make_float2(-INFINITY, 0.f));
  }
  cluster_arrive();
  cluster_wait();
  delay_stores();
  for (int i = tid; i < p.tokens * 16; i += THREADS) {
    int token = i / 16, pair = i % 16;
    float top = -INFINITY, total = 0.f;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int c = 0; c < PARTS; ++c) top = fmaxf(top, extremes[c * TOKENS + token].x);
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
      float2 e = extremes[c * TOKENS + token];
      if (e.x == -INFINITY) continue;
      float weight = exp2f(e.x - top);
      float2 v = *(const float2*)(pushed + (c * TOKENS + token) * 32 + pair * 2);
      total += e.y * weight;
      sum.x += v.x * weight;
      sum.y += v.y * weight;
    }
    float inverse = total > 0.f ? 1.0f / total : 0.f;
    bf16* to = p.out + ((u64)(batch * p.tokens + token) * p.heads + head) * HEAD_DIM + part * 32 + pair * 2;
    *(u32*)to = pack2(sum.x * inverse, sum.y * inverse);
  }
}
