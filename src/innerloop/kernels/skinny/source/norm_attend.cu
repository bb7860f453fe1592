// Layer norm, query product and attention of one head over keys and values that an earlier stage wrote. A cluster of SPLIT
// programs serves one head of one batch entry. Each multiplies its share of x's columns by the weight of all the head's
// features; the sums meet in every program through distributed shared memory, so each has the whole query, scores all keys
// and mixes its share of the values' features: one exchange, none after it. Fixed at compile time: K (width of x), DIM (of a
// head), STEPS (32 keys each), SPLIT, WARPS, MT (16-token tiles), MODULATION_FLOAT, RESIDENT.
#if SPLIT < 2
#error "one program a head is launched without a cluster, where st.async is an illegal instruction"
#endif
#define THREADS (WARPS * 32)
#define KPART (K / SPLIT)            // columns of this program
#define BLOCKS (KPART / 32 / WARPS)  // 32-column blocks of a warp, at least MT
#define TILES (DIM / 16)             // 16-feature weight tiles of a head
#define TILE_BYTES (KPART * 32)      // of one of them in this program
#define FEATURES (DIM / SPLIT)       // of the values in this program
#define TOKENS (MT * 16)
#define FRAGMENTS (DIM / 8)                // accumulator fragments of 16 tokens: 8 features each
#define ITEMS (MT * FRAGMENTS * 32)        // float4 accumulators of a program
#define EACH ((ITEMS + THREADS - 1) / THREADS)
#define PASSES ((STEPS + WARPS - 1) / WARPS)
#define STRIDE(features) (((features) / 8 | 1) * 16)  // an odd number of 16 bytes: ldmatrix reads eight rows from all banks
#define Q_BYTES (DIM * (MT * 32 > WARPS * 8 ? MT * 32 : WARPS * 8))
#define INFINITY __int_as_float(0x7f800000)

struct Args {
  const u8* weight;
  const bf16* x;
  const void* scale;
  const void* shift;
  const bf16* bias;
  const bf16* k;
  const bf16* v;
  const int* key_valid;
  bf16* out;
  u64 batch_stride;  // of k and v, in elements
  u64 row_stride;
  int tokens;  // of one batch entry
  int keys;
  int heads;
  float eps;
  float score_scale;  // times log2(e)
};

// Keys and this program's features of the values, a warp 32 keys; seen[step] has a bit for each that is valid. The others'
// rows become zeros, 0 times what may lie there must be 0; 32 keys of which none is valid are left out.
DEVICE void copy_keys(const Args& p, u64 offset, int batch, int part, u32 keys, u32 values, u32* seen, int warp, int lane) {
  u32 words[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    int key = (warp + i * WARPS) * 32 + lane;
    words[i] = key < p.keys && (!p.key_valid || __ldg(p.key_valid + (u64)batch * p.keys + key));
  }
#pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    const int step = warp + i * WARPS;
    const u32 word = __ballot_sync(0xffffffffu, words[i]);
    if (step >= STEPS) break;
    if (lane == 0) seen[step] = word;
    if (!word) continue;
#pragma unroll
    for (int n = 0; n < DIM / 8; ++n) {
      int row = (n * 32 + lane) / (DIM / 8), piece = (n * 32 + lane) % (DIM / 8);
      bool valid = word >> row & 1;
      u64 from = valid ? offset + (u64)(step * 32 + row) * p.row_stride + piece * 8 : 0;
      copy16(keys + (step * 32 + row) * STRIDE(DIM) + piece * 16, p.k + from, valid ? 16 : 0);
    }
#pragma unroll
    for (int n = 0; n < FEATURES / 8; ++n) {
      int row = (n * 32 + lane) / (FEATURES / 8), piece = (n * 32 + lane) % (FEATURES / 8);
      bool valid = word >> row & 1;
      u64 from = valid ? offset + (u64)(step * 32 + row) * p.row_stride + part * FEATURES + piece * 8 : 0;
      copy16(values + (step * 32 + row) * STRIDE(FEATURES) + piece * 16, p.v + from, valid ? 16 : 0);
    }
  }
}

// c[n]: 16 rows of x times features n * 8 to n * 8 + 7 of a weight tile. lo: words of row r, hi: of row r + 8.
DEVICE void multiply(float4 (&c)[2], uint4 lo, uint4 hi, uint4 w0, uint4 w1) {
  const uint4 first = make_uint4(lo.x, hi.x, lo.y, hi.y), second = make_uint4(lo.z, hi.z, lo.w, hi.w);
  mma(c[0], first, w0.x, w0.z);
  mma(c[1], first, w0.y, w0.w);
  mma(c[0], second, w1.x, w1.z);
  mma(c[1], second, w1.y, w1.w);
}

// W shift and W scale over this warp's columns, side by side for each feature (why: see linear.cu).
DEVICE void table_product(const Args& p, const u8* weights, const float (&scale)[BLOCKS][8], float* parts, int column, u32 bar,
                          int warp, int lane) {
  const int r = lane >> 2, j = lane & 3;
  uint4 x[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    const float* s = scale[b];
    const int at = column + b * 32;
    x[b] = make_uint4(0, 0, 0, 0);
    if (r == 0 && p.shift) {
      x[b] = make_uint4(pack2(modulation(p.shift, at), modulation(p.shift, at + 1)),
                        pack2(modulation(p.shift, at + 2), modulation(p.shift, at + 3)),
                        pack2(modulation(p.shift, at + 4), modulation(p.shift, at + 5)),
                        pack2(modulation(p.shift, at + 6), modulation(p.shift, at + 7)));
    }
    if (r == 1) x[b] = make_uint4(pack2(s[0], s[1]), pack2(s[2], s[3]), pack2(s[4], s[5]), pack2(s[6], s[7]));
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    float4 c[2] = {make_float4(0.f, 0.f, 0.f, 0.f), make_float4(0.f, 0.f, 0.f, 0.f)};
    barrier_wait(bar + t * 8, 0);
    const u8* at = weights + t * TILE_BYTES + warp * BLOCKS * 1024 + lane * 16;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
      multiply(c, x[b], make_uint4(0, 0, 0, 0), load_shared(at + b * 1024), load_shared(at + b * 1024 + 512));
    if (r > 1) continue;
    float* to = parts + (warp * DIM + t * 16 + j * 2) * 2 + r;
    to[0] = c[0].x;
    to[2] = c[0].y;
    to[16] = c[1].x;
    to[18] = c[1].y;
  }
}

// x times the scale, in place, and this warp's sums over each row of x and of its squares.
DEVICE void scale_rows(uint4 (&x)[BLOCKS][2 * MT], const float (&scale)[BLOCKS][8], float2* sums, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < 2 * MT; ++h) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      u32 words[4] = {x[b][h].x, x[b][h].y, x[b][h].z, x[b][h].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float a = low(words[i]), c = high(words[i]);
        sum += a + c;
        squares += a * a + c * c;
        words[i] = pack2(a * scale[b][2 * i], c * scale[b][2 * i + 1]);
      }
      x[b][h] = make_uint4(words[0], words[1], words[2], words[3]);
    }
#pragma unroll
    for (int d = 1; d < 4; d <<= 1) {
      sum += __shfl_xor_sync(0xffffffffu, sum, d);
      squares += __shfl_xor_sync(0xffffffffu, squares, d);
    }
    if ((lane & 3) == 0) sums[warp * TOKENS + h * 8 + (lane >> 2)] = make_float2(sum, squares);
  }
}

// x's rows times this warp's columns of the weights. The sums take the place of the weights that they are made of: no other
// warp reads those.
DEVICE void product(const uint4 (&x)[BLOCKS][2 * MT], u8* weights, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    float4 c[MT][2];
    u8* at = weights + t * TILE_BYTES + warp * BLOCKS * 1024 + lane * 16;
#pragma unroll
    for (int m = 0; m < MT; ++m) c[m][0] = c[m][1] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      uint4 w0 = load_shared(at + b * 1024), w1 = load_shared(at + b * 1024 + 512);
#pragma unroll
      for (int m = 0; m < MT; ++m) multiply(c[m], x[b][2 * m], x[b][2 * m + 1], w0, w1);
    }
#pragma unroll
    for (int m = 0; m < 2 * MT; ++m) *(float4*)(at + m * 512) = c[m / 2][m % 2];
  }
}

DEVICE float2 over(const float2* parts, int count, int stride) {
  float2 s = parts[0];
#pragma unroll
  for (int i = 1; i < count; ++i) s = make_float2(s.x + parts[i * stride].x, s.y + parts[i * stride].y);
  return s;
}

DEVICE float2 mean_and_inverse(float2 sums, float eps) {  // of a row's deviation
  float mean = sums.x * (1.0f / K);
  return make_float2(mean, rsqrtf(fmaxf(sums.y * (1.0f / K) - mean * mean, 0.f) + eps));
}

// Sums over x * scale, of tokens r and r + 8 and two features, to queries. tables: W shift + bias and W scale of the first
// feature, then of the second.
DEVICE uint2 normed(float4 c, float2 first, float2 second, float4 tables) {
  return make_uint2(pack2((c.x - first.x * tables.y) * first.y + tables.x, (c.y - first.x * tables.w) * first.y + tables.z),
                    pack2((c.z - second.x * tables.y) * second.y + tables.x, (c.w - second.x * tables.w) * second.y + tables.z));
}

// Unnormalised out of this warp's keys for 16 tokens, with the largest score and the sum of weights of each token.
DEVICE void attend(const u8* q, u32 keys, u32 values, const u32* seen, float scale, float4* mixed, float2* extremes, int warp,
                   int lane) {
  const int r = lane >> 2, j = lane & 3;
  uint4 query[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) query[i] = load_shared(q + (warp % MT * TILES + i) * 512 + lane * 16);
  float4 acc[FEATURES / 8];
#pragma unroll
  for (int n = 0; n < FEATURES / 8; ++n) acc[n] = make_float4(0.f, 0.f, 0.f, 0.f);
  float2 top = make_float2(-INFINITY, -INFINITY), total = make_float2(0.f, 0.f);  // of tokens r and r + 8
  for (int step = warp / MT; step < STEPS; step += WARPS / MT) {
    const u32 word = seen[step] >> (j * 2);
    if (!seen[step]) continue;
    float4 s[4];  // 8 keys each
    const u32 at = keys + (step * 32 + (lane >> 4) * 8 + (lane & 7)) * STRIDE(DIM) + ((lane >> 3) & 1) * 16;
#pragma unroll
    for (int n = 0; n < 4; ++n) s[n] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      uint4 a = load_matrices(at + i * 32), b = load_matrices(at + 16 * STRIDE(DIM) + i * 32);
      mma(s[0], query[i], a.x, a.y);
      mma(s[1], query[i], a.z, a.w);
      mma(s[2], query[i], b.x, b.y);
      mma(s[3], query[i], b.z, b.w);
    }
    float2 most = top;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      bool even = word >> (n * 8) & 1, odd = word >> (n * 8 + 1) & 1;
      s[n] = make_float4(even ? s[n].x * scale : -INFINITY, odd ? s[n].y * scale : -INFINITY,
                         even ? s[n].z * scale : -INFINITY, odd ? s[n].w * scale : -INFINITY);
      most = make_float2(fmaxf(most.x, fmaxf(s[n].x, s[n].y)), fmaxf(most.y, fmaxf(s[n].z, s[n].w)));
    }
#pragma unroll
    for (int d = 1; d < 4; d <<= 1) {
      most.x = fmaxf(most.x, __shfl_xor_sync(0xffffffffu, most.x, d));
      most.y = fmaxf(most.y, __shfl_xor_sync(0xffffffffu, most.y, d));
    }
    const float2 shrink = make_float2(power(top.x - most.x), power(top.y - most.y));
    top = most;
    total = make_float2(total.x * shrink.x, total.y * shrink.y);
    u32 weights[4][2];  // of tokens r and r + 8
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float4 e = make_float4(power(s[n].x - most.x), power(s[n].y - most.x), power(s[n].z - most.y), power(s[n].w - most.y));
      total = make_float2(total.x + e.x + e.y, total.y + e.z + e.w);
      weights[n][0] = pack2(e.x, e.y);
      weights[n][1] = pack2(e.z, e.w);
    }
#pragma unroll
    for (int n = 0; n < FEATURES / 8; ++n) {
      uint4 v = load_transposed(values + (step * 32 + lane) * STRIDE(FEATURES) + n * 16);
      acc[n] = make_float4(acc[n].x * shrink.x, acc[n].y * shrink.x, acc[n].z * shrink.y, acc[n].w * shrink.y);
      mma(acc[n], make_uint4(weights[0][0], weights[0][1], weights[1][0], weights[1][1]), v.x, v.y);
      mma(acc[n], make_uint4(weights[2][0], weights[2][1], weights[3][0], weights[3][1]), v.z, v.w);
    }
  }
#pragma unroll
  for (int d = 1; d < 4; d <<= 1) {
    total.x += __shfl_xor_sync(0xffffffffu, total.x, d);
    total.y += __shfl_xor_sync(0xffffffffu, total.y, d);
  }
#pragma unroll
  for (int n = 0; n < FEATURES / 8; ++n) mixed[(warp * (FEATURES / 8) + n) * 32 + lane] = acc[n];
  if (j != 0) return;
  extremes[warp * 16 + r] = make_float2(top.x, total.x);
  extremes[warp * 16 + r + 8] = make_float2(top.y, total.y);
}

// One token and two features: over the warps that had its keys.
DEVICE void finish(const Args& p, const float4* mixed, const float2* extremes, int item, bf16* out) {
  const int half = item & 1, lane = item / 2 % 32, n = item / 64 % (FEATURES / 8), mt = item / (FEATURES * 8);
  const int row = (lane >> 2) + half * 8, token = mt * 16 + row;
  if (token >= p.tokens) return;
  float2 e[WARPS / MT];
  float top = -INFINITY, total = 0.f;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS / MT; ++w) {
    e[w] = extremes[(w * MT + mt) * 16 + row];
    top = fmaxf(top, e[w].x);
  }
#pragma unroll
  for (int w = 0; w < WARPS / MT; ++w) {
    float weight = e[w].x == -INFINITY ? 0.f : power(e[w].x - top);
    float2 v = ((const float2*)(mixed + ((w * MT + mt) * (FEATURES / 8) + n) * 32 + lane))[half];
    total += e[w].y * weight;
    sum = make_float2(sum.x + v.x * weight, sum.y + v.y * weight);
  }
  float inverse = total > 0.f ? 1.0f / total : 0.f;
  *(u32*)(out + (u64)token * p.heads * DIM + n * 8 + (lane & 3) * 2) = pack2(sum.x * inverse, sum.y * inverse);
}

extern "C" __global__ void BOUNDS(THREADS) norm_attend(const __grid_constant__ Args p) {
  DYNAMIC_SHARED(memory);  // weights; then each warp's sums; then what each warp mixed
  u8* keys = memory + TILES * TILE_BYTES;
  u8* values = keys + STEPS * 32 * STRIDE(DIM);
  float4* gathered = (float4*)(values + STEPS * 32 * STRIDE(FEATURES));  // [SPLIT][ITEMS], from the cluster
  float2* tables = (float2*)(gathered + SPLIT * ITEMS);                  // [SPLIT][DIM], from the cluster
  float2* moments = tables + SPLIT * DIM;                                // [SPLIT][TOKENS], from the cluster
  float2* own = moments + SPLIT * TOKENS;                                // [WARPS][TOKENS]: sums of rows; then extremes
  u8* q = (u8*)(own + WARPS * TOKENS);                                   // before it: [WARPS][DIM] products with tables
  u64* barriers = (u64*)(q + Q_BYTES);                                   // of TILES weight tiles, the tables, the sums
  u32* seen = (u32*)(barriers + TILES + 2);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, r = lane >> 2, j = lane & 3;
  const int part = (int)cluster_rank(), group = blockIdx.x / SPLIT, head = group % p.heads, batch = group / p.heads;
  const u32 bar = shared_address(barriers), early = bar + TILES * 8, arrived = early + 8;
  const int column = part * KPART + warp * BLOCKS * 32 + j * 8;
  u32 to_peer[SPLIT];  // from an address here to its like in a program of the cluster
#pragma unroll
  for (int peer = 0; peer < SPLIT; ++peer) to_peer[peer] = peer_address(bar, peer) - bar;

  release_successor();
  if (tid == 0) {
    u64 policy = read_once_policy();
    for (int t = 0; t < TILES + 2; ++t) barrier_init(bar + t * 8, 1);
    barrier_init_fence();
    barrier_expect(early, SPLIT * DIM * 8);
    barrier_expect(arrived, SPLIT * (ITEMS * 16 + TOKENS * 8));
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      barrier_expect(bar + t * 8, TILE_BYTES);
      bulk_copy_once(shared_address(memory) + t * TILE_BYTES, p.weight + (u64)(head * TILES + t) * (K * 32) + part * TILE_BYTES,
                     TILE_BYTES, bar + t * 8, policy);
    }
  }
  copy_keys(p, (u64)batch * p.batch_stride + head * DIM, batch, part, shared_address(keys), shared_address(values), seen, warp, lane);
  float scale[BLOCKS][8];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (int i = 0; i < 8; ++i) scale[b][i] = p.scale ? modulation(p.scale, column + b * 32 + i) : 1.0f;
  }
  __syncthreads();
  cluster_arrive();  // this program's barriers exist
  table_product(p, memory, scale, (float*)q, column, bar, warp, lane);
  __syncthreads();
  cluster_wait();
  for (int f = tid; f < DIM; f += THREADS) {
    float2 s = over((const float2*)q + f, WARPS, DIM);
    if (part == 0 && p.bias) s.x += bias_of(p.bias, head * DIM + f);
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer)
      push(shared_address(tables + part * DIM + f) + to_peer[peer], s, early + to_peer[peer]);
  }
  wait_for_producer();

  uint4 x[BLOCKS][2 * MT];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (int h = 0; h < 2 * MT; ++h) {
      int token = h * 8 + r;
      x[b][h] = make_uint4(0, 0, 0, 0);
      if (token < p.tokens) x[b][h] = load_fresh(p.x + ((u64)batch * p.tokens + token) * K + column + b * 32);
    }
  }
  barrier_wait(early, 0);
  float4 table[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const float2* at = tables + (tid + n * THREADS) / 32 % FRAGMENTS * 8 + j * 2;
    float2 first = over(at, SPLIT, DIM), second = over(at + 1, SPLIT, DIM);
    table[n] = make_float4(first.x, first.y, second.x, second.y);
  }
  scale_rows(x, scale, own, warp, lane);
  product(x, memory, warp, lane);
  copies_wait();
  __syncthreads();
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int item = tid + n * THREADS, m = item / (FRAGMENTS * 32), f = item / 32 % FRAGMENTS;
    if (item >= ITEMS) break;
    const u8* from = memory + f / 2 * TILE_BYTES + (m * 2 + f % 2) * 512 + lane * 16;
    float4 s = *(const float4*)from;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) s = add(s, *(const float4*)(from + w * BLOCKS * 1024));
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer)
      push(shared_address(gathered + part * ITEMS + item) + to_peer[peer], s, arrived + to_peer[peer]);
  }
  if (tid < TOKENS) {
    float2 s = over(own + tid, WARPS, TOKENS);
#pragma unroll
    for (int peer = 0; peer < SPLIT; ++peer)
      push(shared_address(moments + part * TOKENS + tid) + to_peer[peer], s, arrived + to_peer[peer]);
  }
  barrier_wait(arrived, 0);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int item = tid + n * THREADS, m = item / (FRAGMENTS * 32), f = item / 32 % FRAGMENTS;
    if (item >= ITEMS) break;
    float4 s = gathered[item];
#pragma unroll
    for (int peer = 1; peer < SPLIT; ++peer) s = add(s, gathered[peer * ITEMS + item]);
    const float2* at = moments + m * 16 + r;
    *(uint2*)(q + (m * TILES + f / 2) * 512 + lane * 16 + f % 2 * 8) =
        normed(s, mean_and_inverse(over(at, SPLIT, TOKENS), p.eps), mean_and_inverse(over(at + 8, SPLIT, TOKENS), p.eps), table[n]);
  }
  __syncthreads();
  attend(q, shared_address(keys), shared_address(values), seen, p.score_scale, (float4*)memory, own, warp, lane);
  __syncthreads();
  delay_stores();
  bf16* out = p.out + ((u64)batch * p.tokens * p.heads + head) * DIM + part * FEATURES;
  for (int item = tid; item < MT * FEATURES * 8; item += THREADS) finish(p, (const float4*)memory, own, item, out);
}
