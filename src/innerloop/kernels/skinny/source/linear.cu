// A linear layer over few rows. Fixed at compile time: PHASE, K, TILES (16-row weight tiles a program), WARPS, SPLIT
// (programs of a cluster that share K), N (output features), NT (8-token column tiles a pass), RESIDENT (programs a multiprocessor must be able to hold), HALF (distance of paired rows), MODULATION_FLOAT,
// POLL (x comes as a message), POLL_RESIDUAL, GATED (the next kernel starts only once x is here), ERASES (message buffers).
#define NORM_QKV_ROPE 0
#define NORM_GLU 1
#define RESIDUAL 2
#ifndef PROBE
#define PROBE 1
#endif
#define HAS_NORM (PHASE != RESIDUAL)
#define THREADS (WARPS * 32)
#define KPART (K / SPLIT)             // columns of this program
#define BLOCKS (KPART / 32 / WARPS)   // 32-column blocks of a warp
#define TILE_BYTES (KPART * 32)       // one weight tile of this program
#define WEIGHT_BYTES (TILES * TILE_BYTES)
#define TOKENS (NT * 8)
#define ITEMS (TILES * NT * 32)       // float4 accumulators of a program
#define TABLE_BYTES (HAS_NORM ? 2 * K * 4 : 0)
#define SQUARES_BYTES (HAS_NORM ? TOKENS * WARPS * 4 : 0)

struct Args {
  const u8* weight;
  const bf16* x;
  const void* scale;
  const void* shift;
  const void* gate;
  const bf16* residual;
  const float* cos;
  const float* sin;
  bf16* out;
  bf16* k_cache;
  bf16* v_cache;
  bf16* k_message;  // [rows, kv_heads, 2 HALF], or null
  bf16* v_message;
  u8* erased[4];
  u64 batch_stride;  // of the caches, in elements
  u64 row_stride;
  int rows;
  int row_tokens;  // tokens of one batch entry
  int start;
  int groups;  // passes of TOKENS rows
  int heads;
  int kv_heads;
  float eps;
  int erased_bytes[4];
};

DEVICE float gelu_tanh(float v) {
  float t = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  float e = __expf(2.0f * t);  // tanh(t) = 1 - 2 / (exp(2t) + 1), right at both ends
  return 0.5f * v * (2.0f - __fdividef(2.0f, e + 1.0f));
}

struct Extra {  // what an accumulator item needs beside its sums, loaded before the product
  float4 a;
  float4 b;
};

DEVICE Extra load_extra(const Args& p, int tile, int token0, int lane) {
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
#if POLL_RESIDUAL
  u32 low_rows, high_rows;
  Patience patience;
  do {
    low_rows = poll_word(from), high_rows = poll_word(from + 8);
    patience.lose();
  } while (absent(low_rows) || absent(high_rows));
#else
  u32 low_rows = load_fresh_word(from), high_rows = load_fresh_word(from + 8);
#endif
  e.a = make_float4(low(low_rows), high(low_rows), low(high_rows), high(high_rows));
  e.b = make_float4(1.f, 1.f, 1.f, 1.f);
  if (p.gate) {
    e.b = make_float4(modulation(p.gate, f), modulation(p.gate, f + 1), modulation(p.gate, f + 8),
                      modulation(p.gate, f + 9));
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
    store_word(to, first_pair);
    store_word(to + HALF, second_pair);
  } else {
    bool is_key = head < p.heads + p.kv_heads;
    int kv = head - p.heads - (is_key ? 0 : p.kv_heads);
    u64 at = (u64)(token / p.row_tokens) * p.batch_stride + (u64)(p.start + token % p.row_tokens) * p.row_stride;
    if (p.k_message) {
      bf16* to = (is_key ? p.k_message : p.v_message) + ((u64)token * p.kv_heads + kv) * (2 * HALF) + d;
      store_word(to, first_pair);
      store_word(to + HALF, second_pair);
    }
    bf16* to = (is_key ? p.k_cache : p.v_cache) + at + (u64)kv * (2 * HALF) + d;
    *(u32*)to = first_pair;
    *(u32*)(to + HALF) = second_pair;
  }
#elif PHASE == NORM_GLU
  float2 h = two_features(gelu_tanh(c.x) * c.z, gelu_tanh(c.y) * c.w, odd);
  if (token >= p.rows) return;
  store_word(p.out + (u64)token * HALF + tile * 8 + (r & ~1), pack2(h.x, h.y));
#else
  float2 first = two_features(c.x, c.y, odd), second = two_features(c.z, c.w, odd);
  if (token >= p.rows) return;
  bf16* to = p.out + (u64)token * N + tile * 16 + (r & ~1);
  store_word(to, pack2(e.a.x + e.b.x * first.x, e.a.y + e.b.y * first.y));
  store_word(to + 8, pack2(e.a.z + e.b.z * second.x, e.a.w + e.b.w * second.y));
#endif
}

DEVICE void receive(const Args& p, uint4 (&x)[BLOCKS][NT], int token0, int column) {
  const bf16* from = p.x + (u64)token0 * K + column;
#if POLL && PROBE  // one vector a lane until it comes, so that waiting does not fill the L2's queues
  {
    uint4 probe = make_uint4(0, 0, 0, 0);
    Patience patience;
    do {
      if (token0 < p.rows) probe = poll(from + (BLOCKS - 1) * 32);
      patience.lose();
    } while (__any_sync(0xffffffffu, absent(probe)));
  }
#endif
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      x[b][nt] = make_uint4(0, 0, 0, 0);
      if (token0 + nt * 8 < p.rows) x[b][nt] = poll(from + nt * 8 * K + b * 32);
    }
  }
#if POLL
  Patience patience;
  while (true) {
    bool missing = false;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) missing |= absent(x[b][nt]);
    }
    if (!__any_sync(0xffffffffu, missing)) break;
    patience.lose();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        if (absent(x[b][nt])) x[b][nt] = poll(from + nt * 8 * K + b * 32);
      }
    }
  }
#endif
}

// Once all of x is here, every kernel before the producer is done with its messages: make room for the next layer's.
DEVICE void erase_messages(const Args& p) {
  const int at = (blockIdx.x * THREADS + threadIdx.x) * 16, step = gridDim.x * THREADS * 16;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    for (int i = at; i < p.erased_bytes[n]; i += step) erase(p.erased[n] + i);
  }
}

DEVICE void normalize(const Args& p, uint4 (&x)[BLOCKS][NT], float* squares, const float* table, int warp, int lane) {
  int r = lane >> 2, j = lane & 3;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    float s = 0.f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const u32 w[4] = {x[b][nt].x, x[b][nt].y, x[b][nt].z, x[b][nt].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) s += low(w[i]) * low(w[i]) + high(w[i]) * high(w[i]);
    }
    s += __shfl_xor_sync(0xffffffffu, s, 1);
    s += __shfl_xor_sync(0xffffffffu, s, 2);
    if (j == 0) squares[(nt * 8 + r) * WARPS + warp] = s;
  }
  __syncthreads();
  float inverse[NT];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) s += squares[(nt * 8 + r) * WARPS + w];
    inverse[nt] = rsqrtf(s * (1.0f / K) + p.eps);
  }
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    const float4* at = (const float4*)(table + (warp * BLOCKS + b) * 32 + j * 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 scale = at[half], shift = at[K / 4 + half];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        u32& first = half ? x[b][nt].z : x[b][nt].x;
        u32& second = half ? x[b][nt].w : x[b][nt].y;
        first = pack2(low_again(first) * inverse[nt] * scale.x + shift.x, high_again(first) * inverse[nt] * scale.y + shift.y);
        second = pack2(low_again(second) * inverse[nt] * scale.z + shift.z, high_again(second) * inverse[nt] * scale.w + shift.w);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) linear(const __grid_constant__ Args p) {
  extern __shared__ __align__(128) u8 memory[];
  float* table = (float*)(memory + WEIGHT_BYTES);
  float* squares = (float*)(memory + WEIGHT_BYTES + TABLE_BYTES);
  u8* gathered = memory + WEIGHT_BYTES + TABLE_BYTES + SQUARES_BYTES;  // sums of the cluster's other programs
  u8* barriers = gathered + (SPLIT - 1) * p.groups * ITEMS * 16;
  u8* spare = barriers + 128;  // partial sums when weights must outlive a pass
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int rank = SPLIT > 1 ? (int)cluster_rank() : 0;
  const u32 arrived = shared_address(barriers) + TILES * 8;  // the sums of the cluster's other programs
  const int tile0 = blockIdx.x / SPLIT * TILES;

  STAMP(0);
#if !GATED
  release_successor();
#endif
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
#if HAS_NORM
  for (int i = tid; i < K; i += THREADS) {
    table[i] = 1.0f + modulation(p.scale, i);
    table[K + i] = p.shift ? modulation(p.shift, i) : 0.0f;
  }
#endif
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();  // this program's barriers exist
  STAMP(1);
#if !POLL
  wait_for_producer();
#endif
  STAMP(2);

  const int r = lane >> 2, j = lane & 3;
  for (int g = 0; g < p.groups; ++g) {
    uint4 x[BLOCKS][NT];
    receive(p, x, g * TOKENS + r, rank * KPART + warp * BLOCKS * 32 + j * 8);
#if GATED
    if (g + 1 == p.groups) release_successor();
#endif
    Extra extra;
    if (tid < ITEMS && rank == 0) extra = load_extra(p, tile0 + tid / (NT * 32), g * TOKENS + (tid / 32 % NT) * 8 + j * 2, lane);
    if (x[0][0].x == 0x12345678u) STAMP(8);
    STAMP(3);
#if HAS_NORM
    normalize(p, x, squares, table, warp, lane);
#endif
    STAMP(4);
#if ERASES
    if (g + 1 == p.groups) erase_messages(p);
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
    STAMP(5);
#if ERASES && !defined(EXP_NOFENCE)
    if (g + 1 == p.groups) fence_device();
#endif
    __syncthreads();
    STAMP(6);
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
      if (n > 0) extra = load_extra(p, tile0 + item / (NT * 32), g * TOKENS + (item / 32 % NT) * 8 + j * 2, lane);
      finish(p, tile0 + item / (NT * 32), g * TOKENS + (item / 32 % NT) * 8 + j * 2, lane, s, extra);
    }
    STAMP(7);
    if (!HAS_NORM && g + 1 < p.groups) __syncthreads();
  }
#if POLL && !defined(EXP_NOWAIT)
  wait_for_producer();  // so that the end of this kernel means the end of all before it
#endif
}
