// Attention of few query rows over many keys. A cluster of 8 programs serves one head of one batch entry: each takes CHUNK
// keys, then 32 of the 256 output features. Fixed at compile time: NT (8-token tiles of the query), CHUNK (multiple of 16),
// OVERLAY (sums of the cluster land where the keys were: less shared memory, one more wait), RESIDENT.
#define HEAD_DIM 256
#define PARTS 8
#define THREADS 256
#define TOKENS (NT * 8)
#define K_STRIDE 576  // bytes; two rows a quarter-warp reads fall into different halves of the banks
#define V_STRIDE 528  // bytes; eight rows that ldmatrix reads fall into different banks
#define P_STRIDE (CHUNK + 8)  // elements; a warp's reads of weights fall into different banks
#define WARPS (THREADS / 32)
#define ROWS ((CHUNK + WARPS - 1) / WARPS)  // key rows that a warp copies, at most 32
#define KEY_TILES (CHUNK / 16)
#define EACH ((KEY_TILES + WARPS - 1) / WARPS)  // key tiles of a warp
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

// s[i][n]: scaled scores of 16 keys (tile warp + i * WARPS) and 8 tokens, -inf where the key is not valid.
DEVICE void scores(const u8* q, const u8* keys, const u8* valid, float scale, float4 (&s)[EACH][NT], int warp, int lane) {
  const int r = lane >> 2, j = lane & 3;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int tile = warp + i * WARPS;
    if (tile >= KEY_TILES) break;
    float4 odd[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) s[i][n] = odd[n] = make_float4(0.f, 0.f, 0.f, 0.f);
    const u8* at = keys + (tile * 16 + r) * K_STRIDE + j * 16;
#pragma unroll
    for (int b = 0; b < HEAD_DIM / 32; ++b) {
      uint4 lo = load_shared(at + b * 64), hi = load_shared(at + 8 * K_STRIDE + b * 64);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        uint4 x = load_shared(q + (n * 8 + r) * K_STRIDE + b * 64 + j * 16);
        mma(s[i][n], make_uint4(lo.x, hi.x, lo.y, hi.y), x.x, x.y);
        mma(odd[n], make_uint4(lo.z, hi.z, lo.w, hi.w), x.z, x.w);
      }
    }
    bool low_key = valid[tile * 16 + r], high_key = valid[tile * 16 + r + 8];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float4 sum = add(s[i][n], odd[n]);
      s[i][n] = make_float4(low_key ? sum.x * scale : -INFINITY, low_key ? sum.y * scale : -INFINITY,
                            high_key ? sum.z * scale : -INFINITY, high_key ? sum.w * scale : -INFINITY);
    }
  }
}

DEVICE float2 over_rows(float2 v, bool maximum) {  // over the 8 lanes that hold other keys of the same two tokens
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) {
    float a = __shfl_xor_sync(0xffffffffu, v.x, d), b = __shfl_xor_sync(0xffffffffu, v.y, d);
    v = maximum ? make_float2(fmaxf(v.x, a), fmaxf(v.y, b)) : make_float2(v.x + a, v.y + b);
  }
  return v;
}

// Largest score of each token in this warp's keys.
DEVICE void warp_maxima(const float4 (&s)[EACH][NT], float* maxima, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float2 top = make_float2(-INFINITY, -INFINITY);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (warp + i * WARPS >= KEY_TILES) break;
      top = make_float2(fmaxf(top.x, fmaxf(s[i][n].x, s[i][n].z)), fmaxf(top.y, fmaxf(s[i][n].y, s[i][n].w)));
    }
    top = over_rows(top, true);
    if (lane < 4) *(float2*)(maxima + warp * TOKENS + n * 8 + lane * 2) = top;
  }
}

// Weights exp2(s - largest of the program) in bf16, and each warp's sums of them.
DEVICE void soften(const float4 (&s)[EACH][NT], const float* maxima, float* sums, bf16* weights, int warp, int lane) {
  const int r = lane >> 2, j = lane & 3;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float2 top = make_float2(-INFINITY, -INFINITY), sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float2 m = *(const float2*)(maxima + w * TOKENS + n * 8 + j * 2);
      top = make_float2(fmaxf(top.x, m.x), fmaxf(top.y, m.y));
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int tile = warp + i * WARPS;
      if (tile >= KEY_TILES) break;
      float4 e = make_float4(exp2f(s[i][n].x - top.x), exp2f(s[i][n].y - top.y), exp2f(s[i][n].z - top.x),
                             exp2f(s[i][n].w - top.y));
      sum = make_float2(sum.x + e.x + e.z, sum.y + e.y + e.w);
      u32 low_key = pack2(e.x, e.y), high_key = pack2(e.z, e.w);
      bf16* to = weights + (n * 8 + j * 2) * P_STRIDE + tile * 16 + r;
      to[0] = (bf16)low_key;
      to[P_STRIDE] = (bf16)(low_key >> 16);
      to[8] = (bf16)high_key;
      to[P_STRIDE + 8] = (bf16)(high_key >> 16);
    }
    sum = over_rows(sum, false);
    if (lane < 4) *(float2*)(sums + warp * TOKENS + n * 8 + lane * 2) = sum;
  }
}

// out^T[32 features of this warp x tokens], unnormalised, straight into the program that finishes these features.
DEVICE void mix(const u8* values, const bf16* weights, u32 pushed, u32 bar, int tokens, int part, int warp, int lane) {
  const int r = lane >> 2, j = lane & 3;
  float4 acc[2][NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) acc[0][n] = acc[1][n] = make_float4(0.f, 0.f, 0.f, 0.f);
  u32 at = shared_address(values) + ((lane >> 4) * 8 + (lane & 7)) * V_STRIDE + (warp * 32 + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll
  for (int k = 0; k < CHUNK; k += 16) {
    uint4 a0 = load_transposed(at + k * V_STRIDE), a1 = load_transposed(at + k * V_STRIDE + 32);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const u32* b = (const u32*)(weights + (n * 8 + r) * P_STRIDE + k) + j;
      mma(acc[0][n], a0, b[0], b[4]);
      mma(acc[1][n], a1, b[0], b[4]);
    }
  }
  u32 to = peer_address(pushed + part * TOKENS * 128, warp), there = peer_address(bar, warp);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float2 a = two_features(acc[m][n].x, acc[m][n].y, r & 1), b = two_features(acc[m][n].z, acc[m][n].w, r & 1);
      int token = n * 8 + j * 2 + (r & 1);
      if (token >= tokens) continue;
      u32 row = to + token * 128 + (m * 16 + (r & ~1)) * 4;
      push(row, a, there);
      push(row + 32, b, there);
    }
  }
}

extern "C" __global__ void BOUNDS(THREADS) attend(const __grid_constant__ Args p) {
  DYNAMIC_SHARED(memory);
  u8* keys = memory;
  u8* values = keys + CHUNK * K_STRIDE;
  u8* q = values + CHUNK * V_STRIDE;
  bf16* weights = (bf16*)q;  // once the scores are known, q is not read any more
  float* maxima = (float*)(q + TOKENS * K_STRIDE);  // [WARPS][TOKENS]
  float* sums = maxima + WARPS * TOKENS;
  float2* extremes = (float2*)(sums + WARPS * TOKENS);  // [PARTS][TOKENS] max and sum, from the cluster
  u8* valid = (u8*)(extremes + PARTS * TOKENS);
  float* pushed = (float*)(OVERLAY ? keys : valid + CHUNK);  // [PARTS][TOKENS][32] from the cluster
  SHARED(u64, barrier, 1);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int part = (int)cluster_rank(), group = blockIdx.x / PARTS;
  const int head = group % p.heads, batch = group / p.heads;
  const int key0 = part * CHUNK;
  const u64 offset = (u64)batch * p.batch_stride + (u64)(head / (p.heads / p.kv_heads)) * HEAD_DIM;
  const u32 bar = shared_address(barrier);

  release_successor();
  if (tid == 0) {
    barrier_init(bar, 1);
    barrier_init_fence();
    barrier_expect(bar, PARTS * p.tokens * (128 + 8));
  }
  __syncthreads();
  if (!OVERLAY) cluster_arrive();  // this program's barrier exists
  // A warp a row, 16 bytes a lane. Rows that are not valid become zeros: 0 times what may lie there must be 0.
  u32 mine = 0;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    int row = warp + i * WARPS, key = key0 + row;
    if (row < CHUNK && key < p.keys && (!p.key_valid || __ldg(p.key_valid + (u64)batch * p.keys + key))) mine |= 1u << i;
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    int row = warp + i * WARPS;
    if (row >= CHUNK) break;
    bool is_valid = mine >> i & 1;
    if (lane == 0) valid[row] = is_valid;
    if (is_valid && key0 + row >= p.start && key0 + row < p.start + p.tokens) continue;
    u64 from = is_valid ? offset + (u64)(key0 + row) * p.row_stride + lane * 8 : 0;
    copy16(shared_address(keys) + row * K_STRIDE + lane * 16, p.k + from, is_valid ? 16 : 0);
    copy16(shared_address(values) + row * V_STRIDE + lane * 16, p.v + from, is_valid ? 16 : 0);
  }
  wait_for_producer();

  const bf16* query = p.q + (u64)batch * p.tokens * p.heads * HEAD_DIM + head * HEAD_DIM;
  for (int i = tid; i < TOKENS * 32; i += THREADS) {
    int token = i / 32, piece = i % 32;
    uint4 w = make_uint4(0, 0, 0, 0);
    if (token < p.tokens) w = load_fresh(query + (u64)token * p.heads * HEAD_DIM + piece * 8);
    *(uint4*)(q + token * K_STRIDE + piece * 16) = w;
  }
  const int fresh = max(p.start - key0, 0), end = min(CHUNK, p.start + p.tokens - key0);
  for (int i = fresh * 64 + tid; i < end * 64; i += THREADS) {  // 32 pieces of a key row, 32 of a value row
    int row = i / 64, piece = i % 32;
    bool is_key = i % 64 < 32;
    if (p.key_valid && !__ldg(p.key_valid + (u64)batch * p.keys + key0 + row)) continue;
    uint4 w = load_fresh((is_key ? p.k : p.v) + offset + (u64)(key0 + row) * p.row_stride + piece * 8);
    *(uint4*)(is_key ? keys + row * K_STRIDE + piece * 16 : values + row * V_STRIDE + piece * 16) = w;
  }
  copies_wait();
  const bool any = __syncthreads_or(mine != 0);
  float4 s[EACH][NT];
  if (any) {
    scores(q, keys, valid, p.scale, s, warp, lane);
    warp_maxima(s, maxima, warp, lane);
    __syncthreads();
    soften(s, maxima, sums, weights, warp, lane);
    __syncthreads();
  }
  if (OVERLAY) cluster_arrive();  // and nothing of its keys is needed
  cluster_wait();
  for (int i = tid; i < p.tokens * PARTS; i += THREADS) {
    int token = i / PARTS, peer = i % PARTS;
    float2 e = make_float2(-INFINITY, 0.f);
    if (any) {
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        e.x = fmaxf(e.x, maxima[w * TOKENS + token]);
        e.y += sums[w * TOKENS + token];
      }
    }
    push(peer_address(shared_address(extremes + part * TOKENS + token), peer), e, peer_address(bar, peer));
  }
  if (any) {
    mix(values, weights, shared_address(pushed), bar, p.tokens, part, warp, lane);
  } else {
    for (int i = tid; i < p.tokens * 16 * PARTS; i += THREADS)
      push(peer_address(shared_address(pushed + part * TOKENS * 32) + i / PARTS * 8, i % PARTS), make_float2(0.f, 0.f),
           peer_address(bar, i % PARTS));
  }
  barrier_wait(bar, 0);
  delay_stores();
  for (int i = tid; i < p.tokens * 16; i += THREADS) {
    int token = i / 16, pair = i % 16;
    float top = -INFINITY, total = 0.f;
    float2 sum = make_float2(0.f, 0.f), e[PARTS];
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
      e[c] = extremes[c * TOKENS + token];
      top = fmaxf(top, e[c].x);
    }
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
      float weight = e[c].x == -INFINITY ? 0.f : exp2f(e[c].x - top);
      float2 v = *(const float2*)(pushed + (c * TOKENS + token) * 32 + pair * 2);
      total += e[c].y * weight;
      sum.x += v.x * weight;
      sum.y += v.y * weight;
    }
    float inverse = total > 0.f ? 1.0f / total : 0.f;
    bf16* to = p.out + ((u64)(batch * p.tokens + token) * p.heads + head) * HEAD_DIM + part * 32 + pair * 2;
    *(u32*)to = pack2(sum.x * inverse, sum.y * inverse);
  }
}
