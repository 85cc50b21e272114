/* The compiled half of the kernels: the same arithmetic, in the same order, as the torch code, bit for bit.
 *
 * Rules that make this possible: compiled with -ffp-contract=off; every sum has a fixed shape (16 lanes and a tree, or 4
 * lanes and a tree); fused multiply-adds are used only where both factors are bf16 values, whose product fp32 holds
 * exactly; exp and log are the polynomials below; nothing else but +, -, *, /, sqrt and comparisons of fp32.
 */
#ifndef VECTORS_H
#define VECTORS_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
#define SPLAT(x) splat(x)
#define PAD(x, n) (((x) + (n) - 1) / (n) * (n))

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf load(const float *p) { vf v; memcpy(&v, p, 64); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, 64); }
INLINE float widen(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
INLINE uint16_t narrow(float f) { uint32_t u; memcpy(&u, &f, 4); return u >> 16; }
INLINE vu round_bits(vf v) { vu u = (vu)v; return u + 0x7fffu + ((u >> 16) & 1u); } /* nearest even; quiet NaN stays NaN */
#if defined(__AVX512F__)
INLINE vf load_bf(const uint16_t *p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
INLINE void store_bf(uint16_t *p, vf v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)round_bits(v), 16)));
}
#else
INLINE vf load_bf(const uint16_t *p) { vh h; memcpy(&h, p, 32); return (vf)(__builtin_convertvector(h, vu) << 16); }
INLINE void store_bf(uint16_t *p, vf v) { vh h = __builtin_convertvector(round_bits(v) >> 16, vh); memcpy(p, &h, 32); }
#endif
INLINE vf to_bf(vf v) { return (vf)(round_bits(v) & 0xffff0000u); }
INLINE vf blend(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
#if defined(__AVX512F__) /* a > b ? a : b, so NaN in b stays */
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vu umax(vu a, vu b) { return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b); }
#else
INLINE vf vmax(vf a, vf b) { return blend(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return blend(a < b, a, b); }
INLINE vu umax(vu a, vu b) { return (vu)blend((vi)(a > b), (vf)a, (vf)b); }
#endif
INLINE vf vabs(vf a) { return (vf)((vu)a & 0x7fffffffu); }
static const vi IOTA = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE vf fma16(vf a, vf b, vf c) { /* only for exact products */
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, 64); memcpy(y, &b, 64); memcpy(z, &c, 64);
    z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]); z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
    memcpy(&c, z, 64);
    return c;
#else
    return a * b + c;
#endif
}

INLINE float fold_sum(vf v) { /* i + (i + 8), then 4, 2, 1 */
#if defined(__AVX512F__)
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
#else
    for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) v[i] = v[i] + v[i + w];
    return v[0];
#endif
}
INLINE float fold_max(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) v[i] = v[i + w] > v[i] ? v[i + w] : v[i];
    return v[0];
#endif
}
INLINE vf tail_load(const float *p, i64 n) {
    if (n >= 16) return load(p);
    vf v = {0}; memcpy(&v, p, 4 * n); return v;
}
INLINE vf tail_load_bf(const uint16_t *p, i64 n) {
    if (n >= 16) return load_bf(p);
    uint16_t t[16] = {0}; memcpy(t, p, 2 * n); return load_bf(t);
}
INLINE void tail_store_bf(uint16_t *p, vf v, i64 n) {
    if (n >= 16) { store_bf(p, v); return; }
    uint16_t t[16]; store_bf(t, v); memcpy(p, t, 2 * n);
}
INLINE void tail_store(float *p, vf v, i64 n) { if (n >= 16) store(p, v); else memcpy(p, &v, 4 * n); }
INLINE vf any_load(const void *p, i64 i, i64 n, int bf) {
    return bf ? tail_load_bf((const uint16_t *)p + i, n) : tail_load((const float *)p + i, n);
}
INLINE void any_store(void *p, i64 i, vf v, i64 n, int bf) {
    if (bf) tail_store_bf((uint16_t *)p + i, v, n); else tail_store((float *)p + i, v, n);
}

/* exp: Cephes' expf without fused operations; 0 below -87, e^88 above 88 */
INLINE vf exp_within(vf c) { /* -87 <= c <= 88 */
    vf shifted = c * SPLAT(1.44269504088896341f) + SPLAT(12582912.0f), n = shifted - SPLAT(12582912.0f);
    vf r = c - n * SPLAT(0.693359375f);
    r = r - n * SPLAT(-2.12194440e-4f);
    vf p = SPLAT(1.9875691500e-4f);
    p = p * r + SPLAT(1.3981999507e-3f);
    p = p * r + SPLAT(8.3334519073e-3f);
    p = p * r + SPLAT(4.1665795894e-2f);
    p = p * r + SPLAT(1.6666665459e-1f);
    p = p * r + SPLAT(5.0000001201e-1f);
    vf y = p * (r * r) + r + SPLAT(1.0f);
    return y * (vf)(((vi)shifted << 23) + (127 << 23)); /* the low bits of `shifted` are the integer n */
}
INLINE vf exp_above(float least, vf x) { /* e^x, 0 below `least`; x <= 88 */
    vf y = exp_within(vmax(SPLAT(least), x));
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)SPLAT(least), _CMP_NLT_UQ), (__m512)y);
#else
    return blend(x < SPLAT(least), SPLAT(0.0f), y);
#endif
}
INLINE vf vexp(vf x) { return exp_above(-87.0f, vmin(SPLAT(88.0f), x)); }
#endif
