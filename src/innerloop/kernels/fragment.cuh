// Loads, barriers and matrix fragments that every kernel here shares. No header is needed to compile it.
typedef unsigned char u8;
typedef unsigned short bf16;  // raw bits
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define MEMBER __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#if RESIDENT  // programs that a multiprocessor must be able to hold; 0 leaves the registers to the compiler
#define BOUNDS(threads) __launch_bounds__(threads, RESIDENT)
#else
#define BOUNDS(threads) __launch_bounds__(threads)
#endif

DEVICE u32 shared_address(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}

// ---- programmatic dependent launch -------------------------------------------------------------------------------
DEVICE void release_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_producer() {
#ifndef UNGUARDED  // only a test leaves the wait out, to show that it would be noticed
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void delay_stores() {
#ifdef DELAY  // only a test compiles this in: a consumer that reads early then reads old values
  for (int i = 0; i < DELAY; ++i) __nanosleep(1000);
#endif
}

// ---- barriers and bulk copies ------------------------------------------------------------------------------------
DEVICE void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes)
               : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
      ::"r"(bar), "r"(parity)
      : "memory");
}
DEVICE u64 read_once_policy() {  // weights are read once a step: they should not push activations and K/V out of L2
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void bulk_copy_once(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
DEVICE void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}

// 16 bytes into shared memory behind the program's back; zeros where `bytes` is 0.
DEVICE void copy16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- clusters ----------------------------------------------------------------------------------------------------
DEVICE u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 peer_address(u32 address, u32 rank) {
  u32 a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(address), "r"(rank));
  return a;
}
// Stores into another program of the cluster; each counts its bytes on a barrier there.
DEVICE void push(u32 address, float2 v, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address), "f"(v.x),
               "f"(v.y), "r"(bar)
               : "memory");
}
DEVICE void push(u32 address, float4 v, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
               : "memory");
}

// ---- boxes of matrices ---------------------------------------------------------------------------------------------
// Arrives at a barrier, to say that reads are over.
DEVICE void tell(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
struct alignas(64) TensorMap {
  u8 bytes[128];
};
DEVICE void fetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE u64 read_often_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// A box of a matrix, from this column and row on.
DEVICE void box(u32 to, const TensorMap* map, int column, int row, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], "
      "%5;" ::"r"(to),
      "l"(map), "r"(bar), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

// ---- products of four warps at once (compute capability 9.0) -------------------------------------------------------
// What they read: rows of 128 bytes, swizzled over 128, eight rows every 1,024 (PTX ISA, matrix descriptor).
DEVICE u64 descriptor(u32 at) { return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING, int COUNT>  // all but the last PENDING commits are done
DEVICE void products_wait(float (&sums)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  if (PENDING == 0)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // none is read before
}
DEVICE int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }  // the same in a warp: so that the compiler knows it
DEVICE void groups_sync(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
DEVICE void groups_sync_of_first(int threads) { asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory"); }

// ---- numbers -----------------------------------------------------------------------------------------------------
DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 pack2(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
DEVICE float modulation(const void* table, int i) {
#if MODULATION_FLOAT
  return __ldg((const float*)table + i);
#else
  return __uint_as_float((u32)__ldg((const bf16*)table + i) << 16);
#endif
}
// What an earlier kernel wrote is read past L1, which is not coherent with a kernel that is still running.
DEVICE uint4 load_fresh(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load_fresh_word(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Bit n: row n, of at most 64, is given: one of the first prefix[e] of the row_tokens rows of its entry e.
DEVICE u64 given_rows(const int* prefix, int rows, int row_tokens) {
  u64 given = 0;
  for (int entry = 0, first = 0; first < rows; ++entry, first += row_tokens) {
    int length = min(max((int)load_fresh_word(prefix + entry), 0), row_tokens);
    given |= ((length < 64 ? 1ull << length : 0ull) - 1) << first;
  }
  return given;
}
DEVICE uint4 load_shared(const u8* p) { return *(const uint4*)p; }
DEVICE uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
DEVICE float load_shared_float(u32 at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
DEVICE void store_shared(u32 at, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEVICE float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

DEVICE float power(float v) {  // of two, 0 of minus infinity
  float p;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(v));
  return p;
}

DEVICE float gelu_tanh(float v) {
  float t = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  float e = __expf(2.0f * t);  // tanh(t) = 1 - 2 / (exp(2t) + 1), right at both ends
  return 0.5f * v * (2.0f - __fdividef(2.0f, e + 1.0f));
}

DEVICE float bias_of(const bf16* table, int i) { return __uint_as_float((u32)__ldg(table + i) << 16); }

// ---- matrix fragments --------------------------------------------------------------------------------------------
// c[16 rows x 8 tokens] += a[16 x 16] b[16 x 8]. Weights are the left operand; tokens are the columns.
DEVICE void mma(float4& c, uint4 a, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// Four 8x8 matrices: lanes 8 i to 8 i + 7 name the rows of matrix i, which lands in word i; a lane gets two neighbours of its row.
DEVICE uint4 load_matrices(u32 a) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}
DEVICE uint4 load_transposed(u32 a) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}
// A lane's accumulators hold two tokens of one feature; its neighbour (lane ^ 4) holds the next feature. Returns two
// neighbouring features of one token: the even feature's lane keeps the first token, the odd one's the second.
DEVICE float2 two_features(float first, float second, bool odd) {
  float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
  return odd ? make_float2(other, second) : make_float2(first, other);
}
