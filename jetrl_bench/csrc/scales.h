#ifndef SCALES_H
#define SCALES_H
#include "vectors.h"

typedef struct { /* mirrors quantizer.QuantSpec */
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
static inline void quantize_row(float *x, i64 n, const Spec *s) { /* in place, one group, rounded to bf16 */
    vf a = {0}, sc, mu;
    for (i64 c = 0; c < n; c += 16) a = vmax(vabs(tail_load(x + c, n - c)), a);
    scale_of(SPLAT(fold_max(a)), s, &sc, &mu);
    for (i64 c = 0; c < n; c += 16) {
        vf v = tail_load(x + c, n - c);
        vf q = round_code(s->apply || s->pow2 ? v * mu : v / sc, s);
        tail_store(x + c, to_bf(q * sc), n - c);
    }
}
#if defined(__AVX512BW__)
/* Power-of-two scales, bf16 in and out: rounding a bf16 mantissa to fewer bits does not see the scale, so it is done on
 * 16-bit words, 7 - mantissa bits for a normal value of the format and one more for each exponent below the smallest
 * normal one. Groups whose amax is not finite, or whose smallest step nears fp32's subnormals, take the general way. */
typedef struct { __m512i bits, half, less, last, keep, one, most; } Words;
INLINE Words words(const Spec *s) {
    int bits = 7 - s->mantissa, half = 1 << (bits - 1);
    return (Words){_mm512_set1_epi16(bits), _mm512_set1_epi16(half), _mm512_set1_epi16(half - 1), _mm512_set1_epi16(1 << bits),
                   _mm512_set1_epi16((short)(0xffff << bits)), _mm512_set1_epi16(1), _mm512_set1_epi16(s->mantissa)};
}
INLINE __m512i magnitude(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi16(0x7fff)); }
/* any magnitudes; least: exponent field of the smallest normal value times the scale */
INLINE __m512i round_small(__m512i v, __m512i least, Words w) {
    __m512i a = magnitude(v), below = _mm512_subs_epu16(least, _mm512_srli_epi16(a, 7));
    __m512i d = _mm512_min_epu16(below, _mm512_add_epi16(w.most, w.one)); /* with more extra bits all round to zero */
    __m512i significand = _mm512_ternarylogic_epi32(a, _mm512_set1_epi16(0x7f), _mm512_set1_epi16(0x80), 0xea); /* a & b | c */
    __m512i even = _mm512_andnot_si512(_mm512_srlv_epi16(significand, _mm512_add_epi16(w.bits, d)), w.one);
    __m512i r = _mm512_sub_epi16(_mm512_add_epi16(a, _mm512_sllv_epi16(w.half, d)), even);
    r = _mm512_and_si512(r, _mm512_sllv_epi16(w.keep, _mm512_min_epu16(d, w.most)));
    __m512i step = _mm512_slli_epi16(_mm512_sub_epi16(least, w.most), 7); /* the smallest value there is */
    r = _mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask(r, step), r);
    return _mm512_ternarylogic_epi32(r, v, _mm512_set1_epi16(0x7fff), 0xf4); /* r | v & ~c: the sign */
}
/* below: the word of the smallest normal value times the scale, less one */
INLINE __m512i round_words(__m512i v, __m512i below, Words w) {
    __m512i a = _mm512_sub_epi16(magnitude(v), w.one);
    if (__builtin_expect(_mm512_cmplt_epu16_mask(a, below) != 0, 0)) /* but not for zeros */
        return round_small(v, _mm512_srli_epi16(_mm512_add_epi16(below, w.one), 7), w);
    __m512i r = _mm512_mask_add_epi16(_mm512_add_epi16(v, w.less), _mm512_test_epi16_mask(v, w.last), v, w.half);
    return _mm512_and_si512(r, w.keep); /* the sign takes no part */
}
/* `below` of 16 groups; 0xffff: the general way */
INLINE __m256i below_words(vf amax, vf scale, const Spec *s) {
    vi e = (vi)((vu)scale >> 23) + s->emin;
    vi general = (vi)((vu)amax >= 0x7f800000u) | (e < s->mantissa + 2);
    return _mm512_cvtepi32_epi16((__m512i)(vu)blend(general, (vf)((vu){0} + 0xffffu), (vf)((e << 7) - 1)));
}
INLINE vf widen_words(__m256i h) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }

/* Whether x [R, C] in blocks of 128 x 1 or 1 x 128 can be rounded on words. */
INLINE int on_words(const Spec *s, i64 C) { return s->pow2 && s->mantissa < 7 && C % 32 == 0; }
/* quantize.c: amax of n <= 1024 columns, a multiple of 32, over `rows` rows -> `below`, and scale and mult unless NULL;
 * returns whether a column takes the general way */
int column_limits(const uint16_t *x, i64 ldx, i64 rows, i64 n, const Spec *s, uint16_t *below, float *scale, float *mult);
enum { PANEL = 1024 };
#endif
/* quantize.c; x [R, C] in blocks of br x bc -> codes x scale (mode 0) or codes (1), and scales or NULL */
void quantize(const void *x, i64 ldx, int xbf, void *out, i64 ldo, int obf, float *scales, i64 R, i64 C, i64 br, i64 bc,
              int mode, const Spec *spec);
#endif
