// A linear layer over few rows. Fixed at compile time: PHASE, K, N (output features), TILES (16-row weight tiles a program),
// WARPS, SPLIT (programs of a cluster that share K), NT (8-token column tiles a pass), HALF (distance of paired rows),
// MODULATION_FLOAT, RESIDENT, GELU (of NORM_LINEAR), PREFIXED (rows may be given: not of NORM_LINEAR).
#define NORM_QKV_ROPE 0
#define NORM_GLU 1
#define RESIDUAL 2
#define NORM_LINEAR 3
#define HAS_NORM (PHASE != RESIDUAL)
#define CENTRED (PHASE == NORM_LINEAR)  // layer norm: its scale is whole, not an offset from 1
#ifndef PREFIXED
#define PREFIXED 0
#endif
#define SCALES (PREFIXED ? 2 : 1)               // tables that a norm keeps: the scale, and that of given rows,
#define PRODUCTS (CENTRED || PREFIXED ? 2 : 1)  // products with tables,
#define SUMS (CENTRED ? 2 : 1)                  // and sums over x
#define THREADS (WARPS * 32)
#define KPART (K / SPLIT)             // columns of this program
#define BLOCKS (KPART / 32 / WARPS)   // 32-column blocks of a warp
#define TILE_BYTES (KPART * 32)       // one weight tile of this program
#define WEIGHT_BYTES (TILES * TILE_BYTES)
#define TOKENS (NT * 8)
#define ITEMS (TILES * NT * 32)       // float4 accumulators of a program
#define ROWS (TILES * 16)
#define TABLE_BYTES (HAS_NORM ? (SCALES * K + PRODUCTS * ROWS * (WARPS + 1)) * 4 : 0)
#define SQUARES_BYTES (HAS_NORM ? SUMS * TOKENS * WARPS * 4 : 0)

struct Args {
  const u8* weight;
  const bf16* x;
  const void* scale;
  const void* shift;
  const void* gate;
  const bf16* residual;
  const bf16* bias;
  const float* cos;
  const float* sin;
  bf16* out;
  bf16* k_cache;
  bf16* v_cache;
  const int* prefix;  // [entries]: how many of an entry's first rows are given; those take the clean tables
  const void* clean_scale;
  const void* clean_shift;
  const void* clean_gate;
  u64 batch_stride;  // of the caches, in elements
  u64 row_stride;
  int rows;
  int row_tokens;  // tokens of one batch entry
  int start;
  int groups;  // passes of TOKENS rows
  int heads;
  int kv_heads;
  float eps;
};

struct Extra {  // what an accumulator item needs beside its sums, loaded before the product
  float4 a;
  float4 b;
};

DEVICE Extra load_extra(const Args& p, u64 given, int tile, int token0, int lane) {
  Extra e;
  e.a = e.b = make_float4(0.f, 0.f, 0.f, 0.f);
  int r = lane >> 2;
#if PHASE == NORM_QKV_ROPE
  int d = (tile % (HALF / 8)) * 8 + r;
  int t0 = min(token0, p.rows - 1), t1 = min(token0 + 1, p.rows - 1);
  if (tile / (HALF / 8) < p.heads + p.kv_heads) {
    e.a = make_float4(__ldg(p.cos + (u64)t0 * HALF + d), __ldg(p.sin + (u64)t0 * HALF + d),
                      __ldg(p.cos + (u64)t1 * HALF + d), __ldg(p.sin + (u64)t1 * HALF + d));
  }
#elif PHASE == RESIDUAL
  int token = min(token0 + (r & 1), p.rows - 1);
  int f = tile * 16 + (r & ~1);
  const bf16* from = p.residual + (u64)token * N + f;
  u32 low_rows = load_fresh_word(from), high_rows = load_fresh_word(from + 8);
  e.a = make_float4(low(low_rows), high(low_rows), low(high_rows), high(high_rows));
  e.b = make_float4(1.f, 1.f, 1.f, 1.f);
  if (p.gate) {
    const void* gate = given >> token & 1 ? p.clean_gate : p.gate;
    e.b = make_float4(modulation(gate, f), modulation(gate, f + 1), modulation(gate, f + 8), modulation(gate, f + 9));
  }
  if (p.bias) {
    e.a = make_float4(e.a.x + e.b.x * bias_of(p.bias, f), e.a.y + e.b.y * bias_of(p.bias, f + 1),
                      e.a.z + e.b.z * bias_of(p.bias, f + 8), e.a.w + e.b.w * bias_of(p.bias, f + 9));
  }
#endif
  return e;
}

DEVICE void finish(const Args& p, int tile, int token0, int lane, float4 c, Extra e) {
  int r = lane >> 2;
  bool odd = r & 1;
  int token = token0 + (odd ? 1 : 0);
#if PHASE == NORM_QKV_ROPE
  int head = tile / (HALF / 8);
  float4 o = c;
  if (head < p.heads + p.kv_heads) {
    o.x = c.x * e.a.x - c.z * e.a.y;
    o.z = c.z * e.a.x + c.x * e.a.y;
    o.y = c.y * e.a.z - c.w * e.a.w;
    o.w = c.w * e.a.z + c.y * e.a.w;
  }
  float2 first = two_features(o.x, o.y, odd), second = two_features(o.z, o.w, odd);
  if (token >= p.rows) return;
  int d = (tile % (HALF / 8)) * 8 + (r & ~1);
  const u32 first_pair = pack2(first.x, first.y), second_pair = pack2(second.x, second.y);
  if (head < p.heads) {
    bf16* to = p.out + ((u64)token * p.heads + head) * (2 * HALF) + d;
    *(u32*)to = first_pair;
    *(u32*)(to + HALF) = second_pair;
  } else {
    bool is_key = head < p.heads + p.kv_heads;
    int kv = head - p.heads - (is_key ? 0 : p.kv_heads);
    u64 at = (u64)(token / p.row_tokens) * p.batch_stride + (u64)(p.start + token % p.row_tokens) * p.row_stride;
    bf16* to = (is_key ? p.k_cache : p.v_cache) + at + (u64)kv * (2 * HALF) + d;
    *(u32*)to = first_pair;
    *(u32*)(to + HALF) = second_pair;
  }
#elif PHASE == NORM_GLU
  float2 h = two_features(gelu_tanh(c.x) * c.z, gelu_tanh(c.y) * c.w, odd);
  if (token >= p.rows) return;
  *(u32*)(p.out + (u64)token * HALF + tile * 8 + (r & ~1)) = pack2(h.x, h.y);
#elif PHASE == NORM_LINEAR
#if GELU
  c = make_float4(gelu_tanh(c.x), gelu_tanh(c.y), gelu_tanh(c.z), gelu_tanh(c.w));
#endif
  float2 first = two_features(c.x, c.y, odd), second = two_features(c.z, c.w, odd);
  if (token >= p.rows) return;
  bf16* to = p.out + (u64)token * N + tile * 16 + (r & ~1);
  *(u32*)(to) = pack2(first.x, first.y);
  *(u32*)(to + 8) = pack2(second.x, second.y);
#else
  float2 first = two_features(c.x, c.y, odd), second = two_features(c.z, c.w, odd);
  if (token >= p.rows) return;
  bf16* to = p.out + (u64)token * N + tile * 16 + (r & ~1);
  *(u32*)(to) = pack2(e.a.x + e.b.x * first.x, e.a.y + e.b.y * first.y);
  *(u32*)(to + 8) = pack2(e.a.z + e.b.z * second.x, e.a.w + e.b.w * second.y);
#endif
}

// W (x / rms * (1 + scale) + shift) = W (x * (1 + scale)) / rms + W shift. The last term needs no x; the rms none of the
// product. So the product starts as soon as x is here. A layer norm also takes mean * W (scale) off: W times the scale is
// a second column of the same early product. Behind an RMS norm that column is the shift of the rows that are given.
DEVICE void shift_product(const Args& p, u64 given, const u8* weights, const float* scale, float* parts, u32 bar, int warp,
                          int lane) {
  const int r = lane >> 2, j = lane & 3;
  const bool second = r == 1 && given;
  const void* shift = second ? p.clean_shift : p.shift;
  uint4 x[BLOCKS];  // the first token column is the shift, the second the scale or the clean shift
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    x[b] = make_uint4(0, 0, 0, 0);
    int at = (warp * BLOCKS + b) * 32 + j * 8;
    if ((r == 0 || second) && p.shift) {
      x[b] = make_uint4(pack2(modulation(shift, at), modulation(shift, at + 1)),
                        pack2(modulation(shift, at + 2), modulation(shift, at + 3)),
                        pack2(modulation(shift, at + 4), modulation(shift, at + 5)),
                        pack2(modulation(shift, at + 6), modulation(shift, at + 7)));
    }
    if (CENTRED && r == 1) {
      x[b] = make_uint4(pack2(scale[at], scale[at + 1]), pack2(scale[at + 2], scale[at + 3]),
                        pack2(scale[at + 4], scale[at + 5]), pack2(scale[at + 6], scale[at + 7]));
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    barrier_wait(bar + t * 8, 0);
    const u8* at = weights + t * TILE_BYTES + warp * BLOCKS * 1024 + lane * 16;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      mma(acc, load_shared(at + b * 1024), x[b].x, x[b].y);
      mma(acc, load_shared(at + b * 1024 + 512), x[b].z, x[b].w);
    }
    if (j == 0) {
      parts[warp * ROWS + t * 16 + r] = acc.x;
      parts[warp * ROWS + t * 16 + r + 8] = acc.z;
      if (CENTRED || given) {
        parts[(WARPS + 1 + warp) * ROWS + t * 16 + r] = acc.y;
        parts[(WARPS + 1 + warp) * ROWS + t * 16 + r + 8] = acc.w;
      }
    }
  }
}

// PICK: rows whose bit of `given` is set take the scale K further on.
template <bool PICK>
DEVICE void scale_rows(u64 given, uint4 (&x)[BLOCKS][NT], float* squares, const float* scale, int warp, int lane) {
  const int r = lane >> 2, j = lane & 3;
  float s[NT], m[NT];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) s[nt] = m[nt] = 0.f;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    const float* at = scale + (warp * BLOCKS + b) * 32 + j * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 by = *(const float4*)(at + half * 4);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        if (PICK) by = *(const float4*)(at + half * 4 + (given >> (nt * 8 + r) & 1 ? K : 0));
        u32& first = half ? x[b][nt].z : x[b][nt].x;
        u32& second = half ? x[b][nt].w : x[b][nt].y;
        float4 v = make_float4(low(first), high(first), low(second), high(second));
        s[nt] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        if (CENTRED) m[nt] += v.x + v.y + v.z + v.w;
        first = pack2(v.x * by.x, v.y * by.y);
        second = pack2(v.z * by.z, v.w * by.w);
      }
    }
  }
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    s[nt] += __shfl_xor_sync(0xffffffffu, s[nt], 1);
    s[nt] += __shfl_xor_sync(0xffffffffu, s[nt], 2);
    if (j == 0) squares[warp * TOKENS + nt * 8 + r] = s[nt];
    if (CENTRED) {
      m[nt] += __shfl_xor_sync(0xffffffffu, m[nt], 1);
      m[nt] += __shfl_xor_sync(0xffffffffu, m[nt], 2);
      if (j == 0) squares[(WARPS + warp) * TOKENS + nt * 8 + r] = m[nt];
    }
  }
}

DEVICE float2 over_warps(const float* parts, int n) {  // of tokens n and n + 1
  float2 s = make_float2(0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    float2 v = *(const float2*)(parts + w * TOKENS + n);
    s = make_float2(s.x + v.x, s.y + v.y);
  }
  return s;
}

// Sums over x * scale -> over the normed, shifted x, for tokens n and n + 1 and rows r and r + 8 of a tile. bias: W shift and
// the linear's own, of this row; W scale, or W times the clean shift, stands (WARPS + 1) * ROWS behind it. given: a bit each
// for tokens n and n + 1.
DEVICE float4 normed(float4 c, u32 given, const float* squares, const float* bias, int n, float eps) {
  float2 s = over_warps(squares, n);
  s = make_float2(s.x * (1.0f / K), s.y * (1.0f / K));
#if CENTRED
  float2 m = over_warps(squares + WARPS * TOKENS, n);
  m = make_float2(m.x * (1.0f / K), m.y * (1.0f / K));
  const float* column = bias + (WARPS + 1) * ROWS;
  c = make_float4(c.x - m.x * column[0], c.y - m.y * column[0], c.z - m.x * column[8], c.w - m.y * column[8]);
  s = make_float2(fmaxf(s.x - m.x * m.x, 0.f), fmaxf(s.y - m.y * m.y, 0.f));
#endif
  float4 add = make_float4(bias[0], bias[0], bias[8], bias[8]);
  if (PREFIXED && given) {
    const float* clean = bias + (WARPS + 1) * ROWS;
    if (given & 1) add.x = clean[0], add.z = clean[8];
    if (given & 2) add.y = clean[0], add.w = clean[8];
  }
  float a = rsqrtf(s.x + eps), b = rsqrtf(s.y + eps);
  return make_float4(c.x * a + add.x, c.y * b + add.y, c.z * a + add.z, c.w * b + add.w);
}

extern "C" __global__ void BOUNDS(THREADS) linear(const __grid_constant__ Args p) {
  DYNAMIC_SHARED(memory);
  float* scale = (float*)(memory + WEIGHT_BYTES);
  float* bias = scale + SCALES * K;  // [PRODUCTS][1 + WARPS][ROWS]: W shift and its parts, the second product and its parts
  float* bias_parts = bias + ROWS;
  float* squares = (float*)(memory + WEIGHT_BYTES + TABLE_BYTES);
  u8* gathered = memory + WEIGHT_BYTES + TABLE_BYTES + SQUARES_BYTES;  // sums of the cluster's other programs
  u8* barriers = gathered + (SPLIT - 1) * p.groups * ITEMS * 16;
  u8* spare = barriers + 128;  // partial sums when weights must outlive a pass
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int rank = SPLIT > 1 ? (int)cluster_rank() : 0;
  const u32 arrived = shared_address(barriers) + TILES * 8;  // the sums of the cluster's other programs
  const int tile0 = blockIdx.x / SPLIT * TILES;

  release_successor();
  if (tid == 0) {
    u64 policy = read_once_policy();
#pragma unroll
    for (int t = 0; t < TILES; ++t) barrier_init(shared_address(barriers) + t * 8, 1);
    for (int g = 0; SPLIT > 1 && g < p.groups; ++g) barrier_init(arrived + g * 8, 1);
    barrier_init_fence();
    for (int g = 0; SPLIT > 1 && rank == 0 && g < p.groups; ++g) barrier_expect(arrived + g * 8, (SPLIT - 1) * ITEMS * 16);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      u32 bar = shared_address(barriers) + t * 8;
      barrier_expect(bar, TILE_BYTES);
      bulk_copy_once(shared_address(memory) + t * TILE_BYTES, p.weight + (u64)(tile0 + t) * (K * 32) + rank * TILE_BYTES,
                     TILE_BYTES, bar, policy);
    }
  }
  const u64 given = PREFIXED ? given_rows(p.prefix, p.rows, p.row_tokens) : 0;
#if HAS_NORM
  for (int i = tid; i < K; i += THREADS)
    scale[i] = CENTRED ? (p.scale ? modulation(p.scale, i) : 1.0f) : 1.0f + modulation(p.scale, i);
  for (int i = tid; given && i < K; i += THREADS) scale[K + i] = 1.0f + modulation(p.clean_scale, i);
#endif
  __syncthreads();
#if HAS_NORM
  if (p.shift || CENTRED) shift_product(p, given, memory, scale, bias_parts, shared_address(barriers), warp, lane);
  __syncthreads();
  for (int i = tid; i < (CENTRED || given ? 2 : 1) * ROWS; i += THREADS) {
    const bool second = i >= ROWS;
    const int row = second ? i - ROWS : i;
    const float* parts = second ? bias_parts + (WARPS + 1) * ROWS : bias_parts;
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) s += second || p.shift ? parts[w * ROWS + row] : 0.f;
    if (CENTRED && !second && p.bias) s += bias_of(p.bias, tile0 * 16 + row);
    bias[(second ? (WARPS + 1) * ROWS : 0) + row] = s;
  }
#endif
  if (SPLIT > 1) cluster_arrive();  // this program's barriers exist
  wait_for_producer();

  const int r = lane >> 2, j = lane & 3;
  const bf16* from = p.x + rank * KPART + warp * BLOCKS * 32 + j * 8;
  for (int g = 0; g < p.groups; ++g) {
    uint4 x[BLOCKS][NT];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        int token = g * TOKENS + nt * 8 + r;
        x[b][nt] = make_uint4(0, 0, 0, 0);
        if (token < p.rows) x[b][nt] = load_fresh(from + (u64)token * K + b * 32);
      }
    }
    Extra extra;
    if (tid < ITEMS && rank == 0) extra = load_extra(p, given, tile0 + tid / (NT * 32), g * TOKENS + (tid / 32 % NT) * 8 + j * 2, lane);
#if HAS_NORM
    if (given >> g * TOKENS)
      scale_rows<PREFIXED != 0>(given >> g * TOKENS, x, squares, scale, warp, lane);
    else
      scale_rows<false>(0, x, squares, scale, warp, lane);
#endif
    const bool reuse = p.groups == 1;  // a warp's own weights are dead once it has multiplied by them
    const u32 tile_stride = reuse ? TILE_BYTES : NT * 512;
    const u32 warp_stride = reuse ? BLOCKS * 1024 : TILES * NT * 512;
    u8* sums = reuse ? memory : spare;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float4 acc[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) acc[nt] = make_float4(0.f, 0.f, 0.f, 0.f);
      barrier_wait(shared_address(barriers) + t * 8, 0);
      const u8* at = memory + t * TILE_BYTES + warp * BLOCKS * 1024 + lane * 16;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        uint4 a0 = load_shared(at + b * 1024), a1 = load_shared(at + b * 1024 + 512);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) mma(acc[nt], a0, x[b][nt].x, x[b][nt].y);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) mma(acc[nt], a1, x[b][nt].z, x[b][nt].w);
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
        *(float4*)(sums + warp * warp_stride + t * tile_stride + nt * 512 + lane * 16) = acc[nt];
    }
    __syncthreads();
    delay_stores();
    if (SPLIT > 1 && g == 0) cluster_wait();
    float4 total[(ITEMS + THREADS - 1) / THREADS];
#pragma unroll
    for (int n = 0; n < (ITEMS + THREADS - 1) / THREADS; ++n) {
      int item = tid + n * THREADS;
      if (item >= ITEMS) break;
      const u8* from = sums + item / (NT * 32) * tile_stride + item % (NT * 32) * 16;
      float4 s = *(const float4*)from;
#pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        float4 v = *(const float4*)(from + w * warp_stride);
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
      }
      total[n] = s;
      if (SPLIT > 1 && rank > 0)
        push(peer_address(shared_address(gathered) + ((g * (SPLIT - 1) + rank - 1) * ITEMS + item) * 16, 0), s,
             peer_address(arrived + g * 8, 0));
    }
    if (SPLIT > 1 && rank == 0) barrier_wait(arrived + g * 8, 0);
#pragma unroll
    for (int n = 0; n < (ITEMS + THREADS - 1) / THREADS; ++n) {
      int item = tid + n * THREADS;
      if (item >= ITEMS || rank > 0) break;
      float4 s = total[n];
#pragma unroll
      for (int q = 1; q < SPLIT; ++q) {
        float4 v = *(const float4*)(gathered + ((g * (SPLIT - 1) + q - 1) * ITEMS + item) * 16);
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
      }
#if HAS_NORM
      const int n0 = item / 32 % NT * 8 + j * 2;
      s = normed(s, given >> (g * TOKENS + n0) & 3, squares, bias + item / (NT * 32) * 16 + r, n0, p.eps);
#endif
      if (n > 0) extra = load_extra(p, given, tile0 + item / (NT * 32), g * TOKENS + (item / 32 % NT) * 8 + j * 2, lane);
      finish(p, tile0 + item / (NT * 32), g * TOKENS + (item / 32 % NT) * 8 + j * 2, lane, s, extra);
    }
    if (g + 1 < p.groups) __syncthreads();
  }
}
