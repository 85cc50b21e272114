/* The compiled half of kernels.py: the same arithmetic, in the same order, as the torch code there, bit for bit.
 *
 * Rules that make this possible: compiled with -ffp-contract=off; every sum has a fixed shape (16 lanes and a tree, or 4
 * lanes and a tree); fused multiply-adds are used only where both factors are bf16 values, whose product fp32 holds
 * exactly; exp and log are the polynomials below; nothing else but +, -, *, /, sqrt and comparisons of fp32.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
#define SPLAT(x) splat(x)

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
    vf n = (c * SPLAT(1.44269504088896341f) + SPLAT(12582912.0f)) - SPLAT(12582912.0f);
    vf r = c - n * SPLAT(0.693359375f);
    r = r - n * SPLAT(-2.12194440e-4f);
    vf p = SPLAT(1.9875691500e-4f);
    p = p * r + SPLAT(1.3981999507e-3f);
    p = p * r + SPLAT(8.3334519073e-3f);
    p = p * r + SPLAT(4.1665795894e-2f);
    p = p * r + SPLAT(1.6666665459e-1f);
    p = p * r + SPLAT(5.0000001201e-1f);
    vf y = p * (r * r) + r + SPLAT(1.0f);
    vi k = __builtin_convertvector(n, vi);
    return y * (vf)((k + 127) << 23);
}
INLINE vf vexp(vf x) {
    vf c = blend(x > SPLAT(88.0f), SPLAT(88.0f), x);
    vi zero = c < SPLAT(-87.0f);
    return blend(zero, SPLAT(0.0f), exp_within(blend(zero, SPLAT(-87.0f), c)));
}
/* log: Cephes' logf without fused operations; for normal positive x */
INLINE float slog(float x) {
    uint32_t u; memcpy(&u, &x, 4);
    int32_t e = (int32_t)(u >> 23) - 126;
    u = (u & 0x007fffffu) | 0x3f000000u;
    float m; memcpy(&m, &u, 4);
    if (m < 0.707106781186547524f) { e = e - 1; m = m + m - 1.0f; } else m = m - 1.0f;
    float z = m * m, p = 7.0376836292e-2f;
    p = p * m + -1.1514610310e-1f; p = p * m + 1.1676998740e-1f; p = p * m + -1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f; p = p * m + -1.6668057665e-1f; p = p * m + 2.0000714765e-1f;
    p = p * m + -2.4999993993e-1f; p = p * m + 3.3333331174e-1f;
    p = p * m * z;
    float ef = (float)e;
    p = p + ef * -2.12194440e-4f;
    p = p + -0.5f * z;
    return (m + p) + ef * 0.693359375f;
}

/* ---------------------------------------------------------------------------------------------- quantisation */
typedef struct { /* mirrors kernels.QuantSpec */
    int32_t mantissa, emin, form, pow2, apply, unused;
    float max, inv_max, amax_floor, scale_floor;
} Spec;

/* amax -> scale (what codes are multiplied by) and mult (what x is multiplied by, unless it is divided by scale) */
INLINE void scale_of(vf amax, const Spec *s, vf *scale, vf *mult) {
    amax = vmax(amax, SPLAT(s->amax_floor));
    vi zero = amax == SPLAT(0.0f);
    amax = blend(zero, SPLAT(s->max), amax);
    vf sc, mu;
    if (s->form <= 1) {
        sc = s->form == 0 ? amax / SPLAT(s->max) : amax * SPLAT(s->inv_max);
        sc = vmax(sc, SPLAT(s->scale_floor));
        if (s->pow2) {
            vu u = (vu)sc; vu e = (u >> 23) + (vu)(((u & 0x7fffffu) != 0) & 1);
            e = (vu)blend((vi)(e < 1u), (vf)((vu){0} + 1u), (vf)e);
            e = (vu)blend((vi)(e > 254u), (vf)((vu){0} + 254u), (vf)e);
            sc = (vf)(e << 23);
        }
        mu = SPLAT(1.0f) / sc;
    } else {
        if (s->form == 2) mu = SPLAT(s->max) / amax;
        else for (int i = 0; i < 16; i++) mu[i] = (float)((double)s->max / (double)amax[i]);
        mu = blend(mu > SPLAT(3.4028234663852886e38f), SPLAT(3.4028234663852886e38f), mu);
        if (s->pow2) mu = (vf)((vu)mu & 0x7f800000u);
        sc = SPLAT(1.0f) / mu;
    }
    *scale = blend(zero, SPLAT(1.0f), sc);
    *mult = blend(zero, SPLAT(1.0f), mu);
}
INLINE vf round_code(vf y, const Spec *s) { /* clamp, then nearest even on the format's grid */
    y = vmax(SPLAT(-s->max), vmin(SPLAT(s->max), y));
    vu e = umax((vu)y & 0x7f800000u, (vu){0} + ((uint32_t)(s->emin + 127) << 23));
    vf magic = (vf)(e + ((uint32_t)(23 - s->mantissa) << 23) + 0x400000u);
    vf r = (y + magic) - magic;
    return (vf)(((vu)r & 0x7fffffffu) | ((vu)y & 0x80000000u));
}
/* x [R, C] with row stride ldx -> out; blocks of br x bc; mode 0: codes * scale, 1: codes. scales [R/br, C/bc] or NULL */
INLINE void quantize_as(const void *x, i64 ldx, const int xbf, void *out, const int obf, float *scales, i64 R, i64 C, i64 br,
                        i64 bc, const int mode, const int divide, const Spec spec) {
    i64 nb = (C + bc - 1) / bc;
    for (i64 r0 = 0; r0 < R; r0 += br) {
        i64 r1 = r0 + br < R ? r0 + br : R;
        if (bc == 1) {
            for (i64 c = 0; c < C; c += 16) {
                i64 n = C - c; vf a = {0}, sc, mu;
                for (i64 r = r0; r < r1; r++) a = vmax(vabs(any_load(x, r * ldx + c, n, xbf)), a);
                scale_of(a, &spec, &sc, &mu);
                if (scales) tail_store(scales + (r0 / br) * nb + c, sc, n);
                for (i64 r = r0; r < r1; r++) {
                    vf v = any_load(x, r * ldx + c, n, xbf);
                    vf q = round_code(divide ? v / sc : v * mu, &spec);
                    any_store(out, r * C + c, mode ? q : q * sc, n, obf);
                }
            }
            continue;
        }
        for (i64 c0 = 0; c0 < C; c0 += bc) {
            i64 c1 = c0 + bc < C ? c0 + bc : C;
            vf a = {0}, sc, mu;
            for (i64 r = r0; r < r1; r++)
                for (i64 c = c0; c < c1; c += 16) a = vmax(vabs(any_load(x, r * ldx + c, c1 - c, xbf)), a);
            scale_of(SPLAT(fold_max(a)), &spec, &sc, &mu);
            if (scales) scales[(r0 / br) * nb + c0 / bc] = sc[0];
            for (i64 r = r0; r < r1; r++)
                for (i64 c = c0; c < c1; c += 16) {
                    vf v = any_load(x, r * ldx + c, c1 - c, xbf);
                    vf q = round_code(divide ? v / sc : v * mu, &spec);
                    any_store(out, r * C + c, mode ? q : q * sc, c1 - c, obf);
                }
        }
    }
}
#if defined(__AVX512BW__)
/* Power-of-two scales, bf16 in and out: rounding a bf16 mantissa to fewer bits does not see the scale, so it is done on
 * 16-bit words; a word vector with an element below the format's smallest normal (or NaN, inf) takes the general way. */
typedef struct { __m512i half, keep; __m128i shift; } Words;
INLINE Words words(const Spec *s) {
    int bits = 7 - s->mantissa;
    return (Words){_mm512_set1_epi16((1 << (bits - 1)) - 1), _mm512_set1_epi16((short)(0xffff << bits)), _mm_cvtsi32_si128(bits)};
}
INLINE __m512i magnitude(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi16(0x7fff)); }
INLINE void round_words(const uint16_t *x, uint16_t *out, __m512i least, vf sc0, vf sc1, vf mu0, vf mu1, Words w, const Spec *s) {
    __m512i v = _mm512_loadu_si512(x), a = magnitude(v);
    if (__builtin_expect(_mm512_mask_cmplt_epu16_mask(_mm512_test_epi16_mask(a, a), a, least) != 0, 0)) {
        store_bf(out, round_code(load_bf(x) * mu0, s) * sc0);
        store_bf(out + 16, round_code(load_bf(x + 16) * mu1, s) * sc1);
        return;
    }
    __m512i odd = _mm512_and_si512(_mm512_srl_epi16(a, w.shift), _mm512_set1_epi16(1));
    __m512i r = _mm512_and_si512(_mm512_add_epi16(_mm512_add_epi16(a, w.half), odd), w.keep);
    _mm512_storeu_si512(out, _mm512_or_si512(r, _mm512_andnot_si512(_mm512_set1_epi16(0x7fff), v)));
}
/* words below which an element is subnormal in the format: 2^emin x scale; everything, if amax is not finite */
INLINE vu least_words(vf amax, vf scale, const Spec *s) {
    vi e = (vi)((vu)scale >> 23) + s->emin;
    vu least = (vu)(e << 7);
    return (vu)blend((vi)((vu)amax >= 0x7f800000u) | (e < 1), (vf)((vu){0} + 0xffffu), (vf)least);
}
INLINE void quantize_rows128(const uint16_t *x, i64 ldx, uint16_t *out, float *scales, i64 R, i64 C, const Spec *s) {
    Words w = words(s);
    for (i64 r = 0; r < R; r++)
        for (i64 c = 0; c < C; c += 128) {
            const uint16_t *p = x + r * ldx + c;
            __m512i m = magnitude(_mm512_loadu_si512(p));
            for (int i = 32; i < 128; i += 32) m = _mm512_max_epu16(m, magnitude(_mm512_loadu_si512(p + i)));
            __m256i h = _mm256_max_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
            vf sc, mu, amax = SPLAT(fold_max((vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)));
            scale_of(amax, s, &sc, &mu);
            __m512i least = _mm512_set1_epi16((short)least_words(amax, sc, s)[0]);
            for (int i = 0; i < 128; i += 32) round_words(p + i, out + r * C + c + i, least, sc, sc, mu, mu, w, s);
            if (scales) scales[(r * C + c) / 128] = sc[0];
        }
}
INLINE void quantize_columns(const uint16_t *x, i64 ldx, uint16_t *out, float *scales, i64 R, i64 C, i64 br, const Spec *s) {
    Words w = words(s);
    for (i64 r0 = 0; r0 < R; r0 += br)
        for (i64 c = 0; c < C; c += 32) {
            i64 r1 = r0 + br < R ? r0 + br : R;
            __m512i m = _mm512_setzero_si512();
            for (i64 r = r0; r < r1; r++) m = _mm512_max_epu16(m, magnitude(_mm512_loadu_si512(x + r * ldx + c)));
            vf sc[2], mu[2];
            __m256i least[2], half[2] = {_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1)};
            for (int i = 0; i < 2; i++) {
                vf amax = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half[i]), 16);
                scale_of(amax, s, sc + i, mu + i);
                least[i] = _mm512_cvtepi32_epi16((__m512i)least_words(amax, sc[i], s));
                if (scales) store(scales + (r0 / br) * C + c + 16 * i, sc[i]);
            }
            __m512i l = _mm512_inserti64x4(_mm512_castsi256_si512(least[0]), least[1], 1);
            for (i64 r = r0; r < r1; r++) round_words(x + r * ldx + c, out + r * C + c, l, sc[0], sc[1], mu[0], mu[1], w, s);
        }
}
#endif
void quantize(const void *x, i64 ldx, int xbf, void *out, int obf, float *scales, i64 R, i64 C, i64 br, i64 bc, int mode,
              const Spec *s) {
    const Spec spec = *s;
    int divide = !spec.apply && !spec.pow2; /* by a power of two, dividing and multiplying are the same */
#if defined(__AVX512BW__)
    if (xbf && obf && !mode && spec.pow2 && spec.mantissa < 7) {
        if (br == 1 && bc == 128 && C % 128 == 0) { quantize_rows128(x, ldx, out, scales, R, C, &spec); return; }
        if (bc == 1 && C % 32 == 0) { quantize_columns(x, ldx, out, scales, R, C, br, &spec); return; }
    }
#endif
    if (xbf && obf && !divide) {
        if (mode) quantize_as(x, ldx, 1, out, 1, scales, R, C, br, bc, 1, 0, spec);
        else quantize_as(x, ldx, 1, out, 1, scales, R, C, br, bc, 0, 0, spec);
    } else
        quantize_as(x, ldx, xbf, out, obf, scales, R, C, br, bc, mode, divide, spec);
}
static void quantize_row(float *x, i64 n, const Spec *s) { /* in place, one group, rounded to bf16 */
    vf a = {0}, sc, mu;
    for (i64 c = 0; c < n; c += 16) a = vmax(vabs(tail_load(x + c, n - c)), a);
    scale_of(SPLAT(fold_max(a)), s, &sc, &mu);
    for (i64 c = 0; c < n; c += 16) {
        vf v = tail_load(x + c, n - c);
        vf q = round_code(s->apply || s->pow2 ? v * mu : v / sc, s);
        tail_store(x + c, to_bf(q * sc), n - c);
    }
}

/* ---------------------------------------------------------------------------------------------- norms, SwiGLU */
void add_rms_norm(const uint16_t *h, const uint16_t *delta, const float *w, float eps, uint16_t *hout, uint16_t *y,
                  float *rstd, i64 R, i64 C) {
    for (i64 r = 0; r < R; r++, h += C, y += C) {
        vf acc = {0};
        const uint16_t *x = h;
        if (delta) {
            for (i64 c = 0; c < C; c += 16) {
                vf v = to_bf(tail_load_bf(h + c, C - c) + tail_load_bf(delta + c, C - c));
                tail_store_bf(hout + c, v, C - c);
                acc = fma16(v, v, acc);
            }
            x = hout;
        } else
            for (i64 c = 0; c < C; c += 16) { vf v = tail_load_bf(h + c, C - c); acc = fma16(v, v, acc); }
        float q = 1.0f / sqrtf(fold_sum(acc) / (float)C + eps);
        if (rstd) rstd[r] = q;
        for (i64 c = 0; c < C; c += 16)
            tail_store_bf(y + c, (tail_load_bf(x + c, C - c) * SPLAT(q)) * tail_load(w + c, C - c), C - c);
        if (delta) { delta += C; hout += C; }
    }
}
void add_rms_norm_backward(const uint16_t *dy, const uint16_t *dh, const uint16_t *x, const float *rstd, const float *w,
                           uint16_t *dx, float *dw, i64 R, i64 C) {
    enum { LANES = 64 };
    i64 Cp = (C + 15) / 16 * 16;
    float *part = calloc(LANES * Cp, 4);
    for (i64 r = 0; r < R; r++, dy += C, x += C, dx += C) {
        vf q = SPLAT(rstd[r]), acc = {0};
        float *p = part + (r % LANES) * Cp;
        for (i64 c = 0; c < C; c += 16) {
            vf g = tail_load_bf(dy + c, C - c), xh = tail_load_bf(x + c, C - c) * q;
            vf gx = g * xh;
            store(p + c, load(p + c) + gx);
            acc = acc + gx * tail_load(w + c, C - c);
        }
        vf m = SPLAT(fold_sum(acc) / (float)C);
        for (i64 c = 0; c < C; c += 16) {
            vf g = tail_load_bf(dy + c, C - c) * tail_load(w + c, C - c), xh = tail_load_bf(x + c, C - c) * q;
            vf d = q * (g - xh * m);
            if (dh) d = d + tail_load_bf(dh + c, C - c);
            tail_store_bf(dx + c, d, C - c);
        }
        if (dh) dh += C;
    }
    for (i64 w2 = LANES / 2; w2; w2 /= 2)
        for (i64 l = 0; l < w2; l++)
            for (i64 c = 0; c < Cp; c += 16) store(part + l * Cp + c, load(part + l * Cp + c) + load(part + (l + w2) * Cp + c));
    memcpy(dw, part, 4 * C);
    free(part);
}
void swiglu(const uint16_t *gu, uint16_t *y, i64 R, i64 F) {
    for (i64 r = 0; r < R; r++, gu += 2 * F, y += F)
        for (i64 c = 0; c < F; c += 16) {
            vf g = tail_load_bf(gu + c, F - c), u = tail_load_bf(gu + F + c, F - c);
            tail_store_bf(y + c, (g / (SPLAT(1.0f) + vexp(-g))) * u, F - c);
        }
}
void swiglu_backward(const uint16_t *dy, const uint16_t *gu, uint16_t *dgu, i64 R, i64 F) {
    for (i64 r = 0; r < R; r++, gu += 2 * F, dgu += 2 * F, dy += F)
        for (i64 c = 0; c < F; c += 16) {
            vf g = tail_load_bf(gu + c, F - c), u = tail_load_bf(gu + F + c, F - c), d = tail_load_bf(dy + c, F - c);
            vf s = SPLAT(1.0f) / (SPLAT(1.0f) + vexp(-g)), gs = g * s;
            tail_store_bf(dgu + c, (d * u) * (s + gs * (SPLAT(1.0f) - s)), F - c);
            tail_store_bf(dgu + F + c, d * gs, F - c);
        }
}

/* ---------------------------------------------------------------------------------------------- attention */
/* C[q][x] = sum over k of A[q][k] B[k][x]: four lanes (k mod 4), each in order of k, then (0 + 2) + (1 + 3).
 * Factors are bf16 values. K a multiple of 4, N of 16. */
INLINE vf row_load(const void *B, i64 i, int bf) { return bf ? load_bf((const uint16_t *)B + i) : load((const float *)B + i); }
#define TILE(Q, V)                                                                                                        \
    {                                                                                                                     \
        vf acc[Q][4][V] = {0};                                                                                            \
        for (i64 k = 0; k < K; k += 4)                                                                                    \
            for (int l = 0; l < 4; l++)                                                                                   \
                for (int v = 0; v < V; v++) {                                                                             \
                    vf b = row_load(B, (k + l) * ldb + x + 16 * v, bf);                                                   \
                    for (int q = 0; q < Q; q++) acc[q][l][v] = fma16(SPLAT(A[q * sq + (k + l) * sk]), b, acc[q][l][v]);         \
                }                                                                                                         \
        for (int q = 0; q < Q; q++)                                                                                       \
            for (int v = 0; v < V; v++)                                                                                   \
                store(C + q * ldc + x + 16 * v, (acc[q][0][v] + acc[q][2][v]) + (acc[q][1][v] + acc[q][3][v]));           \
    }
INLINE void lane_gemm(i64 M, i64 N, i64 K, const float *A, i64 sq, i64 sk, const void *B, i64 ldb, int bf, float *C, i64 ldc) {
    for (; M >= 4; M -= 4, A += 4 * sq, C += 4 * ldc) for (i64 x = 0; x < N; x += 16) TILE(4, 1)
    for (; M >= 2; M -= 2, A += 2 * sq, C += 2 * ldc) {
        i64 x = 0;
        for (; x + 32 <= N; x += 32) TILE(2, 2)
        for (; x < N; x += 16) TILE(2, 1)
    }
    for (; M > 0; M--, A += sq, C += ldc) {
        i64 x = 0;
        for (; x + 32 <= N; x += 32) TILE(1, 2)
        for (; x < N; x += 16) TILE(1, 1)
    }
}
/* one row of scores [n of np] -> bf16-rounded exp(s - max) in place, zero beyond n; returns 1 / sum of unrounded exp */
INLINE float softmax_row(float *s, i64 n, i64 np, float scale) {
    vf m = SPLAT(-INFINITY), sum = {0};
    for (i64 j = 0; j < np; j += 16) {
        vf v = load(s + j) * SPLAT(scale);
        v = blend(IOTA + (int32_t)j < (int32_t)n, v, SPLAT(-INFINITY));
        store(s + j, v);
        m = vmax(v, m);
    }
    vf top = SPLAT(fold_max(m));
    for (i64 j = 0; j < np; j += 16) {
        vf d = load(s + j) - top;
        vi tiny = d < SPLAT(-40.0f);
        vf e = blend(tiny, SPLAT(0.0f), exp_within(blend(tiny, SPLAT(-40.0f), d)));
        sum = sum + e;
        store(s + j, to_bf(e));
    }
    return 1.0f / fold_sum(sum);
}
INLINE void rope_row(const uint16_t *x, const float *cos, const float *sin, i64 D, float *out) {
    i64 half = D / 2;
    for (i64 d = 0; d < half; d += 16) {
        i64 n = half - d;
        vf a = tail_load_bf(x + d, n), b = tail_load_bf(x + half + d, n), c = tail_load(cos + d, n), s = tail_load(sin + d, n);
        tail_store(out + d, to_bf(a * c - b * s), n);
        tail_store(out + half + d, to_bf(b * c + a * s), n);
    }
}
INLINE void unrope_row(const float *x, const float *cos, const float *sin, i64 D, uint16_t *out) { /* the transpose */
    i64 half = D / 2;
    for (i64 d = 0; d < half; d += 16) {
        i64 n = half - d;
        vf a = tail_load(x + d, n), b = tail_load(x + half + d, n), c = tail_load(cos + d, n), s = tail_load(sin + d, n);
        tail_store_bf(out + d, a * c + b * s, n);
        tail_store_bf(out + half + d, b * c - a * s, n);
    }
}
typedef struct { i64 Hq, Hkv, D, ld; float scale; } Heads;
#define PAD(x, n) (((x) + (n) - 1) / (n) * (n))

INLINE void key_row(const uint16_t *row, i64 kv, const Heads *h, const float *cos, const float *sin, const Spec *spec, float *k, float *v) {
    const uint16_t *pk = row + (h->Hq + kv) * h->D, *pv = row + (h->Hq + h->Hkv + kv) * h->D;
    rope_row(pk, cos, sin, h->D, k);
    for (i64 d = 0; d < h->D; d += 16) tail_store(v + d, tail_load_bf(pv + d, h->D - d), h->D - d);
    if (spec) { quantize_row(k, h->D, spec); quantize_row(v, h->D, spec); }
}

/* Packed sequences: qkv [T, ld], starts [S + 1]. out [T, Hq D]; P: bf16 exp rows, per (sequence, head) L x PAD(L, 16) at
 * offsets[s] + head * L * PAD(L, 16); inv [T, Hq]. P and inv may be NULL. cos, sin [*, D / 2] by position. */
void attention(const uint16_t *qkv, const i64 *starts, i64 S, const Heads *hp, const float *cos, const float *sin,
               const Spec *kvspec, uint16_t *out, uint16_t *P, const i64 *offsets, float *inv) {
    const Heads h = *hp;
    i64 D = h.D, Dp = PAD(D, 16), G = h.Hq / h.Hkv, half = D / 2, Lmax = 0;
    for (i64 s = 0; s < S; s++) if (starts[s + 1] - starts[s] > Lmax) Lmax = starts[s + 1] - starts[s];
    i64 Lm = PAD(Lmax, 16);
    float *kT = calloc(Dp * Lm + Lm * Dp + 4 * (Lm + 2 * Dp) + Dp, 4), *V = kT + Dp * Lm, *sc = V + Lm * Dp,
          *q = sc + 4 * Lm, *o = q + 4 * Dp, *tmp = o + 4 * Dp;
    i64 last = 0; /* padding stays zero while the length does not change */
    for (i64 s = 0; s < S; s++) {
        i64 t0 = starts[s], L = starts[s + 1] - t0, Lp = PAD(L, 16);
        for (i64 kv = 0; kv < h.Hkv; kv++) {
            if (L != last) memset(kT, 0, 4 * (Dp * Lm + Lm * Dp));
            last = L;
            for (i64 t = 0; t < L; t++) {
                key_row(qkv + (t0 + t) * h.ld, kv, &h, cos + t * half, sin + t * half, kvspec, tmp, V + t * Dp);
                for (i64 d = 0; d < D; d++) kT[d * Lp + t] = tmp[d];
            }
            for (i64 g = 0; g < G; g++) {
                i64 head = kv * G + g;
                for (i64 t = 0; t < L; t += 4) {
                    i64 m = L - t < 4 ? L - t : 4, np = PAD(t + m, 16);
                    for (i64 i = 0; i < m; i++)
                        rope_row(qkv + (t0 + t + i) * h.ld + head * D, cos + (t + i) * half, sin + (t + i) * half, D, q + i * Dp);
                    lane_gemm(m, np, Dp, q, Dp, 1, kT, Lp, 0, sc, Lm);
                    float il[4];
                    for (i64 i = 0; i < m; i++) {
                        il[i] = softmax_row(sc + i * Lm, t + i + 1, np, h.scale);
                        if (P) {
                            uint16_t *row = P + offsets[s] + (head * L + t + i) * Lp;
                            for (i64 j = 0; j < np; j += 16) store_bf(row + j, load(sc + i * Lm + j));
                            memset(row + np, 0, 2 * (Lp - np));
                            inv[(t0 + t + i) * h.Hq + head] = il[i];
                        }
                    }
                    lane_gemm(m, Dp, PAD(t + m, 4), sc, Lm, 1, V, Dp, 0, o, Dp);
                    for (i64 i = 0; i < m; i++)
                        for (i64 d = 0; d < D; d += 16)
                            tail_store_bf(out + (t0 + t + i) * h.Hq * D + head * D + d, load(o + i * Dp + d) * SPLAT(il[i]), D - d);
                }
            }
        }
    }
    free(kT);
}
void attention_backward(const uint16_t *dout, const uint16_t *out, const uint16_t *qkv, const uint16_t *P, const i64 *offsets,
                        const float *inv, const i64 *starts, i64 S, const Heads *hp, const float *cos, const float *sin,
                        const Spec *kvspec, uint16_t *dqkv) {
    const Heads h = *hp;
    i64 D = h.D, Dp = PAD(D, 16), G = h.Hq / h.Hkv, half = D / 2, Lmax = 0;
    for (i64 s = 0; s < S; s++) if (starts[s + 1] - starts[s] > Lmax) Lmax = starts[s + 1] - starts[s];
    i64 Lm = PAD(Lmax, 16), m = Lm * Dp;
    float *dK = calloc(8 * m + 2 * Lm * Lm + 2 * Dp, 4), *dV = dK + m, *vT = dV + m, *K = vT + m, *Q = K + m, *Gr = Q + m,
          *dQ = Gr + m, *part = dQ + m, *dS = part + m, *PF = dS + Lm * Lm, *tmp = PF + Lm * Lm;
    i64 last = 0; /* padding stays zero while the length does not change */
    for (i64 s = 0; s < S; s++) {
        i64 t0 = starts[s], L = starts[s + 1] - t0, Lp = PAD(L, 16);
        for (i64 kv = 0; kv < h.Hkv; kv++) {
            memset(dK, 0, 4 * (L == last ? 2 * m : 8 * m + 2 * Lm * Lm));
            last = L;
            for (i64 t = 0; t < L; t++) {
                key_row(qkv + (t0 + t) * h.ld, kv, &h, cos + t * half, sin + t * half, kvspec, K + t * Dp, tmp);
                for (i64 d = 0; d < D; d++) vT[d * Lp + t] = tmp[d];
            }
            for (i64 g = 0; g < G; g++) {
                i64 head = kv * G + g;
                const uint16_t *Ps = P + offsets[s] + head * L * Lp;
                for (i64 t = 0; t < L; t++) {
                    i64 row = t0 + t;
                    rope_row(qkv + row * h.ld + head * D, cos + t * half, sin + t * half, D, Q + t * Dp);
                    vf il = SPLAT(inv[row * h.Hq + head]);
                    for (i64 d = 0; d < D; d += 16)
                        tail_store(Gr + t * Dp + d, to_bf(tail_load_bf(dout + row * h.Hq * D + head * D + d, D - d) * il), D - d);
                }
                for (i64 t = 0; t < L; t += 4) {
                    i64 r = L - t < 4 ? L - t : 4, np = PAD(t + r, 16);
                    lane_gemm(r, np, Dp, Gr + t * Dp, Dp, 1, vT, Lp, 0, dS + t * Lp, Lp);
                    for (i64 i = 0; i < r; i++) {
                        vf acc = {0};
                        for (i64 d = 0; d < D; d += 16)
                            acc = fma16(load(Gr + (t + i) * Dp + d), tail_load_bf(out + (t0 + t + i) * h.Hq * D + head * D + d, D - d), acc);
                        vf delta = SPLAT(fold_sum(acc));
                        float *ds = dS + (t + i) * Lp;
                        for (i64 j = 0; j < np; j += 16) {
                            vf p = load_bf(Ps + (t + i) * Lp + j), x = to_bf((p * (load(ds + j) - delta)) * SPLAT(h.scale));
                            store(ds + j, x);
                            store(PF + (t + i) * Lp + j, p);
                        }
                    }
                    lane_gemm(r, Dp, PAD(t + r, 4), dS + t * Lp, Lp, 1, K, Dp, 0, dQ + t * Dp, Dp);
                }
                for (i64 j = 0; j < L; j += 4) { /* queries before key j never saw it */
                    i64 r = L - j < 4 ? L - j : 4;
                    for (int which = 0; which < 2; which++) {
                        float *d = which ? dV : dK;
                        lane_gemm(r, Dp, PAD(L, 4) - j, (which ? PF : dS) + j * Lp + j, 1, Lp, (which ? Gr : Q) + j * Dp, Dp, 0, part, Dp);
                        for (i64 i = 0; i < r * Dp; i += 16) store(d + j * Dp + i, load(d + j * Dp + i) + load(part + i));
                    }
                }
                for (i64 t = 0; t < L; t++)
                    unrope_row(dQ + t * Dp, cos + t * half, sin + t * half, D, dqkv + (t0 + t) * h.ld + head * D);
            }
            for (i64 t = 0; t < L; t++) {
                uint16_t *dk = dqkv + (t0 + t) * h.ld + (h.Hq + kv) * D, *dv = dk + h.Hkv * D;
                unrope_row(dK + t * Dp, cos + t * half, sin + t * half, D, dk);
                for (i64 d = 0; d < D; d += 16) tail_store_bf(dv + d, load(dV + t * Dp + d), D - d);
            }
        }
    }
    free(dK);
}
/* Cache: kT [slots, Hkv, D, Lmax], v [slots, Hkv, Lmax, D], bf16. Writes the keys and values of R rows. */
void append(const uint16_t *qkv, const i64 *slots, const i64 *positions, i64 R, const Heads *hp, const float *cos,
            const float *sin, const Spec *kvspec, uint16_t *kT, uint16_t *vc, i64 Lmax) {
    const Heads h = *hp;
    i64 D = h.D, half = D / 2;
    float k[2 * PAD(D, 16)], *v = k + PAD(D, 16);
    for (i64 r = 0; r < R; r++)
        for (i64 kv = 0; kv < h.Hkv; kv++) {
            i64 p = positions[r], base = (slots[r] * h.Hkv + kv) * D * Lmax;
            key_row(qkv + r * h.ld, kv, &h, cos + p * half, sin + p * half, kvspec, k, v);
            for (i64 d = 0; d < D; d++) kT[base + d * Lmax + p] = narrow(k[d]);
            for (i64 d = 0; d < D; d += 16) tail_store_bf(vc + base + p * D + d, load(v + d), D - d);
        }
}
void decode(const uint16_t *qkv, const i64 *slots, const i64 *positions, i64 R, const Heads *hp, const float *cos,
            const float *sin, const Spec *kvspec, uint16_t *kT, uint16_t *vc, i64 Lmax, uint16_t *out) {
    const Heads h = *hp;
    i64 D = h.D, Dp = PAD(D, 16), G = h.Hq / h.Hkv, half = D / 2, Lm = PAD(Lmax, 16);
    append(qkv, slots, positions, R, hp, cos, sin, kvspec, kT, vc, Lmax);
    float *sc = calloc(G * (Lm + 2 * Dp) + (Dp == D ? 0 : 2 * Dp * Lm), 4), *q = sc + G * Lm, *o = q + G * Dp, *kp = o + G * Dp, *vp = kp + Dp * Lm;
    for (i64 r = 0; r < R; r++)
        for (i64 kv = 0; kv < h.Hkv; kv++) {
            i64 n = positions[r] + 1, np = PAD(n, 16), base = (slots[r] * h.Hkv + kv) * D * Lmax;
            for (i64 g = 0; g < G; g++)
                rope_row(qkv + r * h.ld + (kv * G + g) * D, cos + (n - 1) * half, sin + (n - 1) * half, D, q + g * Dp);
            if (Dp == D) lane_gemm(G, np, D, q, Dp, 1, kT + base, Lmax, 1, sc, Lm);
            else {
                for (i64 d = 0; d < D; d++) for (i64 j = 0; j < n; j++) kp[d * Lm + j] = widen(kT[base + d * Lmax + j]);
                for (i64 j = 0; j < n; j++) for (i64 d = 0; d < D; d++) vp[j * Dp + d] = widen(vc[base + j * D + d]);
                lane_gemm(G, np, Dp, q, Dp, 1, kp, Lm, 0, sc, Lm);
            }
            float il[G];
            for (i64 g = 0; g < G; g++) il[g] = softmax_row(sc + g * Lm, n, np, h.scale);
            if (Dp == D) lane_gemm(G, D, PAD(n, 4), sc, Lm, 1, vc + base, D, 1, o, Dp);
            else lane_gemm(G, Dp, PAD(n, 4), sc, Lm, 1, vp, Dp, 0, o, Dp);
            for (i64 g = 0; g < G; g++)
                for (i64 d = 0; d < D; d += 16)
                    tail_store_bf(out + (r * h.Hq + kv * G + g) * D + d, load(o + g * Dp + d) * SPLAT(il[g]), D - d);
        }
    free(sc);
}

/* ---------------------------------------------------------------------------------------------- head */
/* logits [R, V] -> per row maximum of z = logits / T, sum of exp(z - max); full: log-softmax [R, V] or NULL */
INLINE float head_row(const void *logits, i64 base, int bf, i64 V, float T, float *z, float *exps, float *top, float *entropy) {
    vf m = SPLAT(-INFINITY), sum = {0}, dot = {0};
    for (i64 c = 0; c < V; c += 16) {
        vf v = any_load(logits, base + c, V - c, bf) / SPLAT(T);
        if (V - c < 16) v = blend(IOTA < (int32_t)(V - c), v, SPLAT(-INFINITY));
        store(z + c, v);
        m = vmax(v, m);
    }
    *top = fold_max(m);
    for (i64 c = 0; c < V; c += 16) {
        vf d = load(z + c) - SPLAT(*top), e = vexp(d);
        sum = sum + e;
        if (exps) store(exps + c, e);
        if (entropy) dot = dot + e * blend(e > SPLAT(0.0f), d, SPLAT(0.0f));
    }
    float total = fold_sum(sum);
    if (entropy) *entropy = slog(total) - fold_sum(dot) / total;
    return total;
}
void token_logprobs(const void *logits, int bf, const i64 *tokens, float T, float *logp, float *entropy, float *tops,
                    float *totals, float *full, i64 R, i64 V) {
    float *z = malloc(4 * PAD(V, 16));
    for (i64 r = 0; r < R; r++) {
        totals[r] = head_row(logits, r * V, bf, V, T, z, NULL, tops + r, entropy + r);
        float ln = slog(totals[r]);
        logp[r] = (z[tokens[r]] - tops[r]) - ln;
        if (full) for (i64 c = 0; c < V; c++) full[r * V + c] = (z[c] - tops[r]) - ln;
    }
    free(z);
}
void token_logprobs_backward(const float *grad, const void *logits, int bf, const i64 *tokens, float T, const float *tops,
                             const float *totals, void *dlogits, i64 R, i64 V) {
    for (i64 r = 0; r < R; r++) {
        vf g = SPLAT(grad[r] / T), top = SPLAT(tops[r]), total = SPLAT(totals[r]);
        for (i64 c = 0; c < V; c += 16) {
            vf p = vexp(any_load(logits, r * V + c, V - c, bf) / SPLAT(T) - top) / total;
            vf one = blend(IOTA + (int32_t)c == (int32_t)tokens[r], SPLAT(1.0f), SPLAT(0.0f));
            any_store(dlogits, r * V + c, g * (one - p), V - c, bf);
        }
    }
}
INLINE uint64_t mix(uint64_t x) { /* splitmix64's output function */
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
/* Inverse CDF at u(seed, count): blocks of 16 (tree sums, added in order in fp64), then in order inside the block.
 * Temperature 0: the first maximum, its log-prob at T = 1. */
void sample(const void *logits, int bf, const float *temperatures, const i64 *seeds, const i64 *counts, i64 *tokens,
            float *logp, float *full, i64 R, i64 V) {
    i64 Vp = PAD(V, 16);
    float *z = malloc(8 * Vp), *e = z + Vp;
    double *ends = malloc(8 * (Vp / 16 + 1));
    for (i64 r = 0; r < R; r++) {
        float T = temperatures[r] > 0 ? temperatures[r] : 1.0f, top;
        float total = head_row(logits, r * V, bf, V, T, z, e, &top, NULL), ln = slog(total);
        i64 pick = 0;
        if (temperatures[r] > 0) {
            ends[0] = 0;
            for (i64 b = 0; b < Vp / 16; b++) ends[b + 1] = ends[b] + (double)fold_sum(load(e + 16 * b));
            uint64_t bits = mix((uint64_t)seeds[r] + (uint64_t)(counts[r] + 1) * 0x9e3779b97f4a7c15ull);
            double goal = (double)(bits >> 11) * 0x1p-53 * ends[Vp / 16], sum;
            i64 b = 0;
            while (b < Vp / 16 - 1 && !(ends[b + 1] > goal)) b++;
            for (sum = ends[b], pick = 16 * b; pick < 16 * b + 15; pick++) { sum += e[pick]; if (sum > goal) break; }
            while (pick > 0 && e[pick] == 0) pick--;
        } else
            while (pick < V - 1 && z[pick] != top) pick++;
        tokens[r] = pick;
        logp[r] = (z[pick] - top) - ln;
        if (full) for (i64 c = 0; c < V; c++) full[r * V + c] = (z[c] - top) - ln;
    }
    free(ends);
    free(z);
}

/* ---------------------------------------------------------------------------------------------- GEMM on AMX tiles */
/* C [M, N] = sum over blocks of 128 along K, in order, of block products in fp32; inside a block the tile unit adds 32
 * products at a time. oneDNN's kernels for K <= 128 run the same instructions in the same order. */
#ifdef AMX
int amx_start(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }

/* w [N, K] -> tiles [ceil N/32][ceil K/32][2][16 pairs of k][16 n][2], zero padded */
void pack_rows(const uint16_t *w, i64 ldw, i64 N, i64 K, uint16_t *out) {
    for (i64 n = 0; n < N; n += 32)
        for (i64 k = 0; k < K; k += 32)
            for (i64 h = 0; h < 32; h += 16, out += 512)
                for (i64 c = 0; c < 16; c++)
                    for (i64 e = 0; e < 32; e++) {
                        i64 nn = n + h + c, kk = k + e;
                        out[(e / 2) * 32 + 2 * c + e % 2] = nn < N && kk < K ? w[nn * ldw + kk] : 0;
                    }
}
/* pairs of rows t, t + 1 of x [T, C] at column c: 16 words holding (x[t][c + i], x[t + 1][c + i]) */
INLINE __m512i row_pair(const uint16_t *x, i64 ldx, i64 t, i64 T, i64 c, i64 C) {
    if (t + 1 < T && c + 16 <= C) {
        const uint16_t *p = x + t * ldx + c;
        __m512i l = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
        __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p + ldx)));
        return _mm512_or_si512(l, _mm512_slli_epi32(h, 16));
    }
    uint16_t a[16] = {0}, b[16] = {0};
    i64 n = C - c < 16 ? C - c : 16;
    if (n > 0 && t < T) memcpy(a, x + t * ldx + c, 2 * n);
    if (n > 0 && t + 1 < T) memcpy(b, x + (t + 1) * ldx + c, 2 * n);
    __m512i lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    __m512i hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
    return _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
}
/* x [K, N] with the reduction running down the rows -> the same tiles */
void pack_columns(const uint16_t *x, i64 ldx, i64 N, i64 K, uint16_t *out) {
    for (i64 n = 0; n < N; n += 32)
        for (i64 k = 0; k < K; k += 32)
            for (i64 h = 0; h < 32; h += 16, out += 512)
                for (i64 p = 0; p < 16; p++) _mm512_storeu_si512(out + 32 * p, row_pair(x, ldx, k + 2 * p, K, n + h, N));
}
INLINE void swap_stage(__m512i *v, const int s) { /* transpose the off-diagonal s x s blocks of 16 x 16 words */
    int32_t ia[16], ib[16];
    for (int j = 0; j < 16; j++) { ia[j] = j & s ? 16 + j - s : j; ib[j] = j & s ? 16 + j : j + s; }
    __m512i ma = _mm512_loadu_si512(ia), mb = _mm512_loadu_si512(ib);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (!(i & s)) {
            __m512i a = v[i], b = v[i + s];
            v[i] = _mm512_permutex2var_epi32(a, ma, b);
            v[i + s] = _mm512_permutex2var_epi32(a, mb, b);
        }
}
/* x [T, C] -> out [ceil C/32 * 32, ceil T/32 * 32], zero padded */
static void transpose(const uint16_t *x, i64 ldx, i64 T, i64 C, uint16_t *out) {
    i64 Tp = PAD(T, 32);
    for (i64 c = 0; c < C; c += 16)
        for (i64 t = 0; t < T; t += 32) {
            __m512i v[16];
            for (int p = 0; p < 16; p++) v[p] = row_pair(x, ldx, t + 2 * p, T, c, C);
            swap_stage(v, 1); swap_stage(v, 2); swap_stage(v, 4); swap_stage(v, 8);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (c + i) * Tp + t, v[i]);
        }
}
/* x [M, K] rows, packed w, optional scales xs [M, nb], ws [N, nb], bias bf16 [N]; out bf16 or fp32 [M, N] */
INLINE void gemm_tiles(const uint16_t *x, i64 ldx, i64 M, i64 K, const float *xs, const uint16_t *w, const float *ws, i64 N,
                       const uint16_t *bias, void *out, int obf) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) { config.bytes[i] = 64; config.rows[i] = 16; }
    _tile_loadconfig(&config);
    i64 Kp = PAD(K, 32), nb = PAD(K, 128) / 128;
    float part[1024] __attribute__((aligned(64))), total[1024] __attribute__((aligned(64)));
    uint16_t *rows = M % 32 || K % 32 ? aligned_alloc(64, 64 * Kp) : NULL;
    for (i64 m = 0; m < M; m += 32) {
        i64 mn = M - m < 32 ? M - m : 32, lda = ldx;
        const uint16_t *a = x + m * ldx;
        if (mn < 32 || K % 32) {
            memset(rows, 0, 64 * Kp);
            for (i64 i = 0; i < mn; i++) memcpy(rows + i * Kp, a + i * ldx, 2 * K);
            a = rows; lda = Kp;
        }
        for (i64 n = 0; n < N; n += 32) {
            const uint16_t *b = w + n * Kp;
            i64 nn = N - n < 32 ? N - n : 32;
            for (i64 k0 = 0, block = 0; k0 < Kp; k0 += 128, block++) {
                i64 k1 = k0 + 128 < Kp ? k0 + 128 : Kp;
                float *d = k0 || xs ? part : total;
                _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
                for (i64 k = k0; k < k1; k += 32) {
                    _tile_loadd(4, a + k, lda * 2); _tile_loadd(6, b + k * 32, 64); _tile_loadd(7, b + k * 32 + 512, 64);
                    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
                    if (mn > 16) { _tile_loadd(5, a + 16 * lda + k, lda * 2); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
                }
                _tile_stored(0, d, 128); _tile_stored(1, d + 16, 128); _tile_stored(2, d + 512, 128); _tile_stored(3, d + 528, 128);
                if (xs) {
                    float scale[32] = {0};
                    for (i64 j = 0; j < nn; j++) scale[j] = ws[(n + j) * nb + block];
                    for (i64 i = 0; i < mn; i++)
                        for (i64 j = 0; j < 32; j += 16) {
                            vf v = load(part + 32 * i + j) * (SPLAT(xs[(m + i) * nb + block]) * load(scale + j));
                            store(total + 32 * i + j, k0 ? load(total + 32 * i + j) + v : v);
                        }
                } else if (k0)
                    for (i64 i = 0; i < 32 * mn; i += 16) store(total + i, load(total + i) + load(part + i));
            }
            for (i64 i = 0; i < mn; i++)
                for (i64 j = 0; j < nn; j += 16) {
                    vf v = load(total + 32 * i + j);
                    if (bias) v = v + tail_load_bf(bias + n + j, nn - j);
                    any_store(out, (m + i) * N + n + j, v, nn - j, obf);
                }
        }
    }
    _tile_release();
    free(rows);
}
void gemm(const uint16_t *x, i64 ldx, i64 M, i64 K, const float *xs, const uint16_t *w, const float *ws, i64 N,
          const uint16_t *bias, void *out, int obf) {
    if (obf && !xs && !bias) gemm_tiles(x, ldx, M, K, NULL, w, NULL, N, NULL, out, 1);
    else gemm_tiles(x, ldx, M, K, xs, w, ws, N, bias, out, obf);
}
/* a [T, M], b [T, N] -> fp32 [M, N], the sum running over T; scales as [M, nb], [N, nb] or NULL */
void gemm_tokens(const uint16_t *a, i64 lda, i64 M, const float *as, const uint16_t *b, i64 ldb, i64 N, const float *bs, i64 T,
                 float *out) {
    i64 Tp = PAD(T, 32);
    uint16_t *at = aligned_alloc(64, 2 * (PAD(M, 32) + PAD(N, 32)) * Tp), *bp = at + PAD(M, 32) * Tp;
    transpose(a, lda, T, M, at);
    pack_columns(b, ldb, N, T, bp);
    gemm_tiles(at, Tp, M, Tp, as, bp, bs, N, NULL, out, 0);
    free(at);
}
#else
int amx_start(void) { return -1; }
#endif
