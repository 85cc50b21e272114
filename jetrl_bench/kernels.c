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

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
#define SPLAT(x) ((vf){0} + (float)(x))

INLINE vf load(const float *p) { vf v; memcpy(&v, p, 64); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, 64); }
INLINE float widen(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
INLINE vf load_bf(const uint16_t *p) { vh h; memcpy(&h, p, 32); return (vf)(__builtin_convertvector(h, vu) << 16); }
INLINE vu round_bits(vf v) { /* to nearest even bf16; NaN stays NaN */
    vu u = (vu)v, r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (vu)(v != v);
    return (nan & 0x7fc0u) | (~nan & r);
}
INLINE void store_bf(uint16_t *p, vf v) { vh h = __builtin_convertvector(round_bits(v), vh); memcpy(p, &h, 32); }
INLINE vf to_bf(vf v) { return (vf)(round_bits(v) << 16); }
INLINE vf blend(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vmax(vf a, vf b) { return blend(a > b, a, b); }
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

INLINE float fold_sum(vf v) {
    for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) v[i] = v[i] + v[i + w];
    return v[0];
}
INLINE float fold_max(vf v) {
    for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) v[i] = v[i + w] > v[i] ? v[i + w] : v[i];
    return v[0];
}
INLINE vf tail_load(const float *p, i64 n) { vf v = {0}; memcpy(&v, p, n < 16 ? 4 * n : 64); return v; }
INLINE vf tail_load_bf(const uint16_t *p, i64 n) {
    if (n >= 16) return load_bf(p);
    uint16_t t[16] = {0}; memcpy(t, p, 2 * n); return load_bf(t);
}
INLINE void tail_store_bf(uint16_t *p, vf v, i64 n) {
    if (n >= 16) { store_bf(p, v); return; }
    uint16_t t[16]; store_bf(t, v); memcpy(p, t, 2 * n);
}
INLINE void tail_store(float *p, vf v, i64 n) { memcpy(p, &v, n < 16 ? 4 * n : 64); }
INLINE vf any_load(const void *p, i64 i, i64 n, int bf) {
    return bf ? tail_load_bf((const uint16_t *)p + i, n) : tail_load((const float *)p + i, n);
}
INLINE void any_store(void *p, i64 i, vf v, i64 n, int bf) {
    if (bf) tail_store_bf((uint16_t *)p + i, v, n); else tail_store((float *)p + i, v, n);
}

/* exp: Cephes' expf without fused operations; 0 below -87, e^88 above 88 */
INLINE vf vexp(vf x) {
    vf c = blend(x > SPLAT(88.0f), SPLAT(88.0f), x);
    vi zero = c < SPLAT(-87.0f);
    c = blend(zero, SPLAT(-87.0f), c);
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
    y = y * (vf)((k + 127) << 23);
    return blend(zero, SPLAT(0.0f), y);
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
    vf lim = SPLAT(s->max);
    y = blend(y > lim, lim, y);
    y = blend(y < -lim, -lim, y);
    vu e = (vu)y & 0x7f800000u;
    vu lo = (vu){0} + ((uint32_t)(s->emin + 127) << 23);
    e = (vu)blend((vi)(e < lo), (vf)lo, (vf)e);
    vf magic = (vf)(e + ((uint32_t)(23 - s->mantissa) << 23) + 0x400000u);
    vf r = (y + magic) - magic;
    return (vf)(((vu)r & 0x7fffffffu) | ((vu)y & 0x80000000u));
}
/* x [R, C] with row stride ldx -> out; blocks of br x bc; mode 0: codes * scale, 1: codes. scales [R/br, C/bc] or NULL */
void quantize(const void *x, i64 ldx, int xbf, void *out, int obf, float *scales, i64 R, i64 C, i64 br, i64 bc, int mode,
              const Spec *s) {
    const Spec spec = *s;
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
                    vf q = round_code(spec.apply ? v * mu : v / sc, &spec);
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
                    vf q = round_code(spec.apply ? v * mu : v / sc, &spec);
                    any_store(out, r * C + c, mode ? q : q * sc, c1 - c, obf);
                }
        }
    }
}
static void quantize_row(float *x, i64 n, const Spec *s) { /* in place, one group, rounded to bf16 */
    vf a = {0}, sc, mu;
    for (i64 c = 0; c < n; c += 16) a = vmax(vabs(tail_load(x + c, n - c)), a);
    scale_of(SPLAT(fold_max(a)), s, &sc, &mu);
    for (i64 c = 0; c < n; c += 16) {
        vf v = tail_load(x + c, n - c);
        vf q = round_code(s->apply ? v * mu : v / sc, s);
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
                    for (int q = 0; q < Q; q++) acc[q][l][v] = fma16(SPLAT(A[q * lda + k + l]), b, acc[q][l][v]);         \
                }                                                                                                         \
        for (int q = 0; q < Q; q++)                                                                                       \
            for (int v = 0; v < V; v++)                                                                                   \
                store(C + q * ldc + x + 16 * v, (acc[q][0][v] + acc[q][2][v]) + (acc[q][1][v] + acc[q][3][v]));           \
    }
INLINE void lane_gemm(i64 M, i64 N, i64 K, const float *A, i64 lda, const void *B, i64 ldb, int bf, float *C, i64 ldc) {
    for (; M >= 4; M -= 4, A += 4 * lda, C += 4 * ldc) for (i64 x = 0; x < N; x += 16) TILE(4, 1)
    for (; M > 0; M--, A += lda, C += ldc) {
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
        vf d = load(s + j) - top, e = vexp(d);
        e = blend(d < SPLAT(-40.0f), SPLAT(0.0f), e);
        sum = sum + e;
        store(s + j, to_bf(e));
    }
    return 1.0f / fold_sum(sum);
}
INLINE void rope_row(const uint16_t *x, const float *cos, const float *sin, i64 D, float *out, int sign) {
    i64 half = D / 2; /* sign -1: the inverse rotation */
    for (i64 d = 0; d < half; d++) {
        float a = widen(x[d]), b = widen(x[d + half]), c = cos[d], s = sign * sin[d];
        out[d] = a * c - b * s;
        out[d + half] = b * c + a * s;
    }
    for (i64 d = 0; d < D; d += 16) { vf v = tail_load(out + d, D - d); tail_store(out + d, to_bf(v), D - d); }
}
typedef struct { i64 Hq, Hkv, D, ld; float scale; } Heads;
#define PAD(x, n) (((x) + (n) - 1) / (n) * (n))

INLINE void key_row(const uint16_t *row, i64 kv, const Heads *h, const float *cos, const float *sin, const Spec *spec, float *k, float *v) {
    const uint16_t *pk = row + (h->Hq + kv) * h->D, *pv = row + (h->Hq + h->Hkv + kv) * h->D;
    rope_row(pk, cos, sin, h->D, k, 1);
    for (i64 d = 0; d < h->D; d++) v[d] = widen(pv[d]);
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
    for (i64 s = 0; s < S; s++) {
        i64 t0 = starts[s], L = starts[s + 1] - t0, Lp = PAD(L, 16);
        for (i64 kv = 0; kv < h.Hkv; kv++) {
            memset(kT, 0, 4 * (Dp * Lm + Lm * Dp));
            for (i64 t = 0; t < L; t++) {
                key_row(qkv + (t0 + t) * h.ld, kv, &h, cos + t * half, sin + t * half, kvspec, tmp, V + t * Dp);
                for (i64 d = 0; d < D; d++) kT[d * Lp + t] = tmp[d];
            }
            for (i64 g = 0; g < G; g++) {
                i64 head = kv * G + g;
                for (i64 t = 0; t < L; t += 4) {
                    i64 m = L - t < 4 ? L - t : 4, np = PAD(t + m, 16);
                    for (i64 i = 0; i < m; i++)
                        rope_row(qkv + (t0 + t + i) * h.ld + head * D, cos + (t + i) * half, sin + (t + i) * half, D, q + i * Dp, 1);
                    lane_gemm(m, np, Dp, q, Dp, kT, Lp, 0, sc, Lm);
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
                    lane_gemm(m, Dp, PAD(t + m, 4), sc, Lm, V, Dp, 0, o, Dp);
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
    float *vT = calloc(8 * m + 3 * Lm * Lm + 2 * Dp, 4), *K = vT + m, *Q = K + m, *Gr = Q + m, *dK = Gr + m, *dV = dK + m,
          *dQ = dV + m, *part = dQ + m, *dS = part + m, *dST = dS + Lm * Lm, *PT = dST + Lm * Lm, *tmp = PT + Lm * Lm;
    for (i64 s = 0; s < S; s++) {
        i64 t0 = starts[s], L = starts[s + 1] - t0, Lp = PAD(L, 16);
        for (i64 kv = 0; kv < h.Hkv; kv++) {
            memset(vT, 0, 4 * (8 * m + 3 * Lm * Lm));
            for (i64 t = 0; t < L; t++) {
                key_row(qkv + (t0 + t) * h.ld, kv, &h, cos + t * half, sin + t * half, kvspec, K + t * Dp, tmp);
                for (i64 d = 0; d < D; d++) vT[d * Lp + t] = tmp[d];
            }
            for (i64 g = 0; g < G; g++) {
                i64 head = kv * G + g;
                const uint16_t *Ps = P + offsets[s] + head * L * Lp;
                for (i64 t = 0; t < L; t++) {
                    i64 row = t0 + t;
                    rope_row(qkv + row * h.ld + head * D, cos + t * half, sin + t * half, D, Q + t * Dp, 1);
                    vf il = SPLAT(inv[row * h.Hq + head]);
                    for (i64 d = 0; d < D; d += 16)
                        tail_store(Gr + t * Dp + d, to_bf(tail_load_bf(dout + row * h.Hq * D + head * D + d, D - d) * il), D - d);
                }
                for (i64 t = 0; t < L; t += 4) {
                    i64 r = L - t < 4 ? L - t : 4, np = PAD(t + r, 16);
                    lane_gemm(r, np, Dp, Gr + t * Dp, Dp, vT, Lp, 0, dS + t * Lp, Lp);
                    for (i64 i = 0; i < r; i++) {
                        vf acc = {0};
                        for (i64 d = 0; d < D; d += 16)
                            acc = fma16(load(Gr + (t + i) * Dp + d), tail_load_bf(out + (t0 + t + i) * h.Hq * D + head * D + d, D - d), acc);
                        vf delta = SPLAT(fold_sum(acc));
                        float *ds = dS + (t + i) * Lp;
                        for (i64 j = 0; j < np; j += 16) {
                            vf p = load_bf(Ps + (t + i) * Lp + j), x = to_bf((p * (load(ds + j) - delta)) * SPLAT(h.scale));
                            store(ds + j, x);
                            for (int e = 0; e < 16; e++) { PT[(j + e) * Lp + t + i] = p[e]; dST[(j + e) * Lp + t + i] = x[e]; }
                        }
                    }
                    lane_gemm(r, Dp, PAD(t + r, 4), dS + t * Lp, Lp, K, Dp, 0, dQ + t * Dp, Dp);
                }
                for (i64 j = 0; j < L; j += 4) { /* queries before key j never saw it */
                    i64 r = L - j < 4 ? L - j : 4;
                    for (int which = 0; which < 2; which++) {
                        float *d = which ? dV : dK;
                        lane_gemm(r, Dp, PAD(L, 4) - j, (which ? PT : dST) + j * Lp + j, Lp, (which ? Gr : Q) + j * Dp, Dp, 0, part, Dp);
                        for (i64 i = 0; i < r * Dp; i += 16) store(d + j * Dp + i, load(d + j * Dp + i) + load(part + i));
                    }
                }
                for (i64 t = 0; t < L; t++) {
                    uint16_t *dst = dqkv + (t0 + t) * h.ld + head * D;
                    const float *c = cos + t * half, *sn = sin + t * half, *x = dQ + t * Dp;
                    for (i64 d = 0; d < half; d++) { tmp[d] = x[d] * c[d] + x[d + half] * sn[d]; tmp[d + half] = x[d + half] * c[d] - x[d] * sn[d]; }
                    for (i64 d = 0; d < D; d += 16) tail_store_bf(dst + d, load(tmp + d), D - d);
                }
            }
            for (i64 t = 0; t < L; t++) {
                uint16_t *dk = dqkv + (t0 + t) * h.ld + (h.Hq + kv) * D, *dv = dk + h.Hkv * D;
                const float *c = cos + t * half, *sn = sin + t * half, *x = dK + t * Dp;
                for (i64 d = 0; d < half; d++) { tmp[d] = x[d] * c[d] + x[d + half] * sn[d]; tmp[d + half] = x[d + half] * c[d] - x[d] * sn[d]; }
                for (i64 d = 0; d < D; d += 16) { tail_store_bf(dk + d, load(tmp + d), D - d); tail_store_bf(dv + d, load(dV + t * Dp + d), D - d); }
            }
        }
    }
    free(vT);
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
            for (i64 d = 0; d < D; d++) { uint32_t u; memcpy(&u, k + d, 4); kT[base + d * Lmax + p] = u >> 16; }
            for (i64 d = 0; d < D; d++) { uint32_t u; memcpy(&u, v + d, 4); vc[base + p * D + d] = u >> 16; }
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
                rope_row(qkv + r * h.ld + (kv * G + g) * D, cos + (n - 1) * half, sin + (n - 1) * half, D, q + g * Dp, 1);
            if (Dp == D) lane_gemm(G, np, D, q, Dp, kT + base, Lmax, 1, sc, Lm);
            else {
                for (i64 d = 0; d < D; d++) for (i64 j = 0; j < n; j++) kp[d * Lm + j] = widen(kT[base + d * Lmax + j]);
                for (i64 j = 0; j < n; j++) for (i64 d = 0; d < D; d++) vp[j * Dp + d] = widen(vc[base + j * D + d]);
                lane_gemm(G, np, Dp, q, Dp, kp, Lm, 0, sc, Lm);
            }
            float il[G];
            for (i64 g = 0; g < G; g++) il[g] = softmax_row(sc + g * Lm, n, np, h.scale);
            if (Dp == D) lane_gemm(G, D, PAD(n, 4), sc, Lm, vc + base, D, 1, o, Dp);
            else lane_gemm(G, Dp, PAD(n, 4), sc, Lm, vp, Dp, 0, o, Dp);
            for (i64 g = 0; g < G; g++)
                for (i64 d = 0; d < D; d += 16)
                    tail_store_bf(out + (r * h.Hq + kv * G + g) * D + d, load(o + g * Dp + d) * SPLAT(il[g]), D - d);
        }
    free(sc);
}

/* ---------------------------------------------------------------------------------------------- head */
/* logits [R, V] -> per row maximum of z = logits / T, sum of exp(z - max); full: log-softmax [R, V] or NULL */
INLINE float head_row(const void *logits, i64 base, int bf, i64 V, float T, float *z, float *top, float *entropy) {
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
        totals[r] = head_row(logits, r * V, bf, V, T, z, tops + r, entropy + r);
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
/* Inverse CDF at u(seed, count); temperature 0: the first maximum, its log-prob at T = 1. */
void sample(const void *logits, int bf, const float *temperatures, const i64 *seeds, const i64 *counts, i64 *tokens,
            float *logp, float *full, i64 R, i64 V) {
    float *z = malloc(4 * PAD(V, 16)), *e = malloc(4 * PAD(V, 16));
    for (i64 r = 0; r < R; r++) {
        float T = temperatures[r] > 0 ? temperatures[r] : 1.0f, top;
        float total = head_row(logits, r * V, bf, V, T, z, &top, NULL), ln = slog(total);
        i64 pick = 0;
        if (temperatures[r] > 0) {
            double sum = 0, cum = 0;
            for (i64 c = 0; c < V; c += 16) store(e + c, vexp(load(z + c) - SPLAT(top)));
            for (i64 c = 0; c < V; c++) sum += e[c];
            uint64_t bits = mix((uint64_t)seeds[r] + (uint64_t)(counts[r] + 1) * 0x9e3779b97f4a7c15ull);
            double goal = (double)(bits >> 11) * 0x1p-53 * sum;
            for (pick = 0; pick < V - 1; pick++) { cum += e[pick]; if (cum > goal) break; }
            while (pick > 0 && e[pick] == 0) pick--;
        } else
            while (pick < V - 1 && z[pick] != top) pick++;
        tokens[r] = pick;
        logp[r] = (z[pick] - top) - ln;
        if (full) for (i64 c = 0; c < V; c++) full[r * V + c] = (z[c] - top) - ln;
    }
    free(z);
    free(e);
}
