// fragment.cuh for a processor: the sources of the CUDA kernels, run by one host thread. Every thread of a cluster is a
// coroutine that runs until it waits. Programs begin at random moments, bulk copies and messages to other programs arrive at
// random later ones, products of four warps are made as late as their wait allows, and threads take turns in random order:
// what a kernel does not wait for, it finds undone. What the
// hardware would not do either (too many arrivals, a message to a program that has ended or to a barrier that is not there
// yet, an address that is not aligned) is an error.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

typedef unsigned char u8;
typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static float2 make_float2(float a, float b) { return {a, b}; }
static float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
static uint2 make_uint2(u32 a, u32 b) { return {a, b}; }
static uint4 make_uint4(u32 a, u32 b, u32 c, u32 d) { return {a, b, c, d}; }
using std::max;
using std::min;

#define DEVICE static inline
#define MEMBER
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define BOUNDS(threads)
#define __fdividef(a, b) ((a) / (b))
#define __expf expf
#undef INFINITY
#define __int_as_float(i) bits_float(i)
#define __uint_as_float(i) bits_float(i)
#define __float_as_uint(f) float_bits(f)
#define SHARED(type, name, count) type* name = (type*)(shared_memory() + place(#name, sizeof(type) * (count)))
#define DYNAMIC_SHARED(name) u8* name = shared_memory() + DYNAMIC

static float bits_float(u32 i) { float f; memcpy(&f, &i, 4); return f; }
static u32 float_bits(float f) { u32 i; memcpy(&i, &f, 4); return i; }

// ---- threads, warps, programs, a cluster ---------------------------------------------------------------------------
struct Three { int x; };
static Three threadIdx, blockIdx, gridDim;
const u32 PROGRAM = 1 << 20, DYNAMIC = 1152;  // bytes of a program's memory; where its dynamic part begins
const int MOST = 16;                                         // programs of a cluster
static u8* memory_;
struct Meeting { int there = 0, turn = 0; };
struct Product { u64 x, w; };
struct Warp { Meeting meeting; u64 word[32][12]; };
struct Thread {
  ucontext_t context;
  char* stack;
  bool done;
  int index, program, seen;
  std::vector<Product> open;
  std::vector<std::vector<Product>> committed;
};
struct Program {
  Meeting all, groups, first_groups;
  std::vector<Warp> warps;
  int block, votes, starts;  // votes: of __syncthreads_or; starts: after so many turns
};
static std::vector<Thread> threads_;
static std::vector<Program> programs_;
static Meeting cluster_;
static ucontext_t scheduler_;
static int now_, width_;
static u64 seed_;

static u32 random_() { seed_ = seed_ * 6364136223846793005ull + 1442695040888963407ull; return u32(seed_ >> 33); }
struct Failure { const char* what; };
[[noreturn]] static void fail(const char* what) { throw Failure{what}; }
static Thread& me() { return threads_[now_]; }
static Program& program_() { return programs_[me().program]; }
static Warp& warp_() { return program_().warps[me().index / 32]; }
static int lane_() { return me().index % 32; }
static u8* shared_memory() { return memory_ + u64(me().program) * PROGRAM; }
static u32 place(const char* name, size_t bytes) {  // of what a kernel names in shared memory
  static std::map<std::string, u32> places;
  static u32 used = 64;
  auto found = places.find(name);
  if (found == places.end()) found = places.emplace(name, used).first, used += u32(bytes + 7) / 8 * 8;
  if (used > DYNAMIC) fail("there is no more room for named memory");
  return found->second;
}
static void pause_() { swapcontext(&me().context, &scheduler_); }
static void meet(Meeting& m, int count) {
  const int turn = m.turn;
  if (++m.there == count) m.there = 0, ++m.turn;
  else while (m.turn == turn) pause_();
}
static void __syncthreads() { meet(program_().all, width_); }
static bool __syncthreads_or(bool vote) {
  program_().votes |= vote, __syncthreads();
  const bool any = program_().votes;
  __syncthreads();
  program_().votes = 0, __syncthreads();
  return any;
}
static void __syncwarp() { meet(warp_().meeting, 32); }
DEVICE void groups_sync(int threads) { meet(program_().groups, threads); }
DEVICE void groups_sync_of_first(int threads) { meet(program_().first_groups, threads); }
DEVICE u32 cluster_rank() { return me().program; }
DEVICE void cluster_arrive() {
  me().seen = cluster_.turn;
  if (++cluster_.there == width_ * int(programs_.size())) cluster_.there = 0, ++cluster_.turn;
}
DEVICE void cluster_wait() { while (cluster_.turn == me().seen) pause_(); }
static bool ended(u32 program) {
  return std::all_of(threads_.begin(), threads_.end(), [=](const Thread& t) { return t.program != int(program) || t.done; });
}

// ---- dependent launch, barriers --------------------------------------------------------------------------------------
DEVICE void release_successor() {}
DEVICE void wait_for_producer() { pause_(); }
DEVICE void delay_stores() {}
DEVICE u32 shared_address(const void* p) { return u32((const u8*)p - memory_); }
DEVICE u32 peer_address(u32 address, u32 rank) { return address % PROGRAM + rank * PROGRAM; }
struct Barrier { int pending, count; long bytes; u32 phase; };
static std::map<u32, Barrier> barriers_;
static Barrier& barrier_(u32 at) {
  auto found = barriers_.find(at);
  if (found == barriers_.end()) fail("no barrier is there");
  if (ended(at / PROGRAM)) fail("the barrier's program has ended");
  return found->second;
}
static void turned(Barrier& b) {
  if (b.pending < 0) fail("more arrive than are expected");
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
static void landed(u32 at, u32 bytes) { Barrier& b = barrier_(at); b.bytes -= bytes; turned(b); }
DEVICE void barrier_init(u32 at, u32 count) { barriers_[at] = {int(count), int(count), 0, 0}; }
DEVICE void barrier_init_fence() {}
DEVICE void barrier_expect(u32 at, u32 bytes) { Barrier& b = barrier_(at); b.bytes += bytes, --b.pending; turned(b); }
DEVICE void tell(u32 at) { Barrier& b = barrier_(at); --b.pending; turned(b); }
DEVICE void barrier_wait(u32 at, u32 parity) { while (barrier_(at).phase == parity) pause_(); }

// ---- copies ------------------------------------------------------------------------------------------------------------
static std::vector<std::function<void()>> flying_;
static void land_some() {
  for (size_t i = 0; i < flying_.size();) {
    if (random_() % 4) { ++i; continue; }
    auto landing = flying_[i];
    flying_.erase(flying_.begin() + long(i));
    landing();
  }
}
DEVICE u64 read_once_policy() { return 0; }
DEVICE u64 read_often_policy() { return 0; }
static void aligned(u64 address, int bytes) { if (address % bytes) fail("an address is not aligned"); }
DEVICE void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
  aligned(to, 16), aligned(u64(from), 16), aligned(bytes, 16);
  flying_.push_back([=] { memcpy(memory_ + to, from, bytes); landed(bar, bytes); });
}
DEVICE void bulk_copy_once(u32 to, const void* from, u32 bytes, u32 bar, u64) { bulk_copy(to, from, bytes, bar); }
DEVICE void copy16(u32 to, const void* from, u32 bytes) {
  aligned(to, 16);
  if (bytes) aligned(u64(from), 16), memcpy(memory_ + to, from, 16);
  else memset(memory_ + to, 0, 16);
}
DEVICE void copies_wait() {}
struct alignas(64) TensorMap { const bf16* data; int64_t rows, columns, box_rows; u8 unused[96]; };
DEVICE void fetch_map(const TensorMap*) {}
static u32 swizzled(u32 at) { return at ^ (((at >> 7) & 7) << 4); }
DEVICE void box(u32 to, const TensorMap* map, int column, int row, u32 bar, u64) {
  const TensorMap m = *map;
  aligned(to, 128);
  flying_.push_back([=] {
    for (int r = 0; r < m.box_rows; ++r)
      for (int c = 0; c < 64; ++c) {
        const bool inside = row + r < m.rows && column + c < m.columns;
        const bf16 v = inside ? m.data[(row + r) * m.columns + column + c] : 0;
        memcpy(memory_ + swizzled(to + r * 128 + c * 2), &v, 2);
      }
    landed(bar, u32(m.box_rows * 128));
  });
}
template <class V> static void send(u32 at, V v, u32 bar) {
  aligned(at, sizeof(V));
  flying_.push_back([=] { memcpy(memory_ + at, &v, sizeof(V)), landed(bar, sizeof(V)); });
}
DEVICE void push(u32 at, float2 v, u32 bar) { send(at, v, bar); }
DEVICE void push(u32 at, float4 v, u32 bar) { send(at, v, bar); }

// ---- numbers -----------------------------------------------------------------------------------------------------------
DEVICE float low(u32 pair) { return bits_float(pair << 16); }
DEVICE float high(u32 pair) { return bits_float(pair & 0xffff0000u); }
static u32 rounded(float f) {
  const u32 i = float_bits(f);
  return (i & 0x7fffffff) > 0x7f800000 ? 0x7fff : (i + 0x7fff + (i >> 16 & 1)) >> 16;
}
DEVICE u32 pack2(float lo, float hi) { return rounded(lo) | rounded(hi) << 16; }
DEVICE float power(float v) { return exp2f(v); }
DEVICE float gelu_tanh(float v) { return 0.5f * v * (1.f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v))); }
DEVICE float bias_of(const bf16* table, int i) { return bits_float(u32(table[i]) << 16); }
#define modulation(table, i) (MODULATION_FLOAT ? ((const float*)(table))[i] : bias_of((const bf16*)(table), i))
DEVICE uint4 load_fresh(const void* p) { uint4 v; aligned(u64(p), 16), memcpy(&v, p, 16); return v; }
DEVICE u32 load_fresh_word(const void* p) { u32 v; memcpy(&v, p, 4); return v; }
DEVICE uint4 load_shared(const u8* p) { uint4 v; aligned(u64(p), 16), memcpy(&v, p, 16); return v; }
DEVICE uint4 load_shared(u32 at) { return load_shared(memory_ + at); }
DEVICE float load_shared_float(u32 at) { float v; aligned(at, 4), memcpy(&v, memory_ + at, 4); return v; }
DEVICE void store_shared(u32 at, u32 v) { aligned(at, 4), memcpy(memory_ + at, &v, 4); }
DEVICE u64 given_rows(const int* prefix, int rows, int row_tokens) {
  u64 given = 0;
  for (int row = 0; row < rows; ++row)
    if (row % row_tokens < prefix[row / row_tokens]) given |= 1ull << row;
  return given;
}
DEVICE float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { return *p; }
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static float __shfl_xor_sync(u32, float v, int distance) {
  Warp& w = warp_();
  w.word[lane_()][0] = float_bits(v), __syncwarp();
  const float other = bits_float(u32(w.word[lane_() ^ distance][0]));
  __syncwarp();
  return other;
}
DEVICE int uniform(int v) { return v; }
DEVICE float2 two_features(float first, float second, bool odd) {
  const float other = __shfl_xor_sync(~0u, odd ? first : second, 4);
  return odd ? make_float2(other, second) : make_float2(first, other);
}
static u32 __ballot_sync(u32, bool vote) {
  Warp& w = warp_();
  u32 votes = 0;
  w.word[lane_()][0] = vote, __syncwarp();
  for (int i = 0; i < 32; ++i) votes |= u32(w.word[i][0]) << i;
  __syncwarp();
  return votes;
}

// ---- products ------------------------------------------------------------------------------------------------------------
static float half_of(u64 word, int odd) { return odd ? high(u32(word)) : low(u32(word)); }
DEVICE void mma(float4& c, uint4 a, u32 b0, u32 b1) {  // 16 x 8 x 16
  Warp& w = warp_();
  u64* mine = w.word[lane_()];
  mine[0] = a.x, mine[1] = a.y, mine[2] = a.z, mine[3] = a.w, mine[4] = b0, mine[5] = b1;
  __syncwarp();
  float sum[4];
  for (int q = 0; q < 4; ++q) {
    const int row = lane_() / 4 + q / 2 * 8, column = lane_() % 4 * 2 + q % 2;
    sum[q] = 0.f;
    for (int k = 0; k < 16; ++k)
      sum[q] += half_of(w.word[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                half_of(w.word[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
  }
  __syncwarp();
  c = add(c, {sum[0], sum[1], sum[2], sum[3]});
}
static uint4 matrices(u32 at, bool transposed) {
  Warp& w = warp_();
  aligned(at, 16);
  w.word[lane_()][0] = at, __syncwarp();
  u32 v[4];
  const int r = lane_() / 4, c = lane_() % 4 * 2;
  for (int m = 0; m < 4; ++m)
    for (int i = 0; i < 2; ++i) {
      const int row = transposed ? c + i : r, column = transposed ? r : c + i;
      memcpy((bf16*)&v[m] + i, memory_ + w.word[m * 8 + row][0] + column * 2, 2);
    }
  __syncwarp();
  return {v[0], v[1], v[2], v[3]};
}
DEVICE uint4 load_matrices(u32 at) { return matrices(at, false); }
DEVICE uint4 load_transposed(u32 at) { return matrices(at, true); }

DEVICE u64 descriptor(u32 at) { aligned(at, 1024); return at % PROGRAM / 16; }  // and two on for every 16 columns
static float element(u64 matrix, int row, int column) {
  const u32 at = u32(matrix) * 16 + row / 8 * 1024 + row % 8 * 128 + column * 2;
  bf16 v;
  memcpy(&v, shared_memory() + swizzled(at), 2);
  return bits_float(u32(v) << 16);
}
DEVICE void products_begin() {}
template <int COUNT> DEVICE void multiply(float (&)[COUNT], u64 x, u64 w) { me().open.push_back({x, w}); }
DEVICE void products_commit() { me().committed.push_back(std::move(me().open)), me().open.clear(); }
template <int PENDING, int COUNT> DEVICE void products_wait(float (&sums)[COUNT]) {
  Thread& t = me();
  if (random_() % 2) pause_();
  for (; t.committed.size() > PENDING; t.committed.erase(t.committed.begin()))
    for (const Product& product : t.committed[0])
      for (int i = 0; i < COUNT; ++i) {
        const int row = t.index / 32 % 4 * 16 + lane_() / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane_() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) sums[i] += element(product.x, row, k) * element(product.w, column, k);
      }
  __syncwarp();
}
