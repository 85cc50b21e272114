#include "scales.h"

/* x [R, C] with row stride ldx -> out with row stride ldo; blocks of br x bc; mode 0: codes * scale, 1: codes. scales [R/br, C/bc] or NULL */
INLINE void quantize_as(const void *x, i64 ldx, const int xbf, void *out, i64 ldo, const int obf, float *scales, i64 R, i64 C,
                        i64 br, i64 bc, const int mode, const int divide, const Spec spec) {
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
                    any_store(out, r * ldo + c, mode ? q : q * sc, n, obf);
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
                    any_store(out, r * ldo + c, mode ? q : q * sc, c1 - c, obf);
                }
        }
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

INLINE __m512i max_words(__m512i m, const uint16_t *p, i64 width) {
    if (width == 128) {
#pragma GCC unroll 4
        for (int i = 0; i < 128; i += 32) m = _mm512_max_epu16(m, magnitude(_mm512_loadu_si512(p + i)));
    } else
        for (i64 i = 0; i < width; i += 32) m = _mm512_max_epu16(m, magnitude(_mm512_loadu_si512(p + i)));
    return m;
}
INLINE void round_row(const uint16_t *p, uint16_t *o, i64 width, __m512i below, Words w) {
    if (width == 128) {
#pragma GCC unroll 4
        for (int i = 0; i < 128; i += 32) _mm512_storeu_si512(o + i, round_words(_mm512_loadu_si512(p + i), below, w));
    } else
        for (i64 i = 0; i < width; i += 32) _mm512_storeu_si512(o + i, round_words(_mm512_loadu_si512(p + i), below, w));
}
/* blocks of br x 128, C a multiple of 32 */
static void quantize_rows(const uint16_t *x, i64 ldx, uint16_t *out, i64 ldo, float *scales, i64 R, i64 C, i64 br, const Spec *s) {
    enum { BATCH = 64 }; /* groups whose scales are found together */
    Words w = words(s);
    i64 nb = PAD(C, 128) / 128, num = nb * ((R + br - 1) / br), r0 = 0, c0 = 0;
    for (i64 g0 = 0; g0 < num; g0 += BATCH) {
        i64 n = num - g0 < BATCH ? num - g0 : BATCH, r = r0, c = c0;
        uint16_t amax[BATCH] = {0}, below[BATCH];
        float scale[BATCH], mult[BATCH];
        for (i64 g = 0; g < n; g++) {
            const uint16_t *p = x + r * ldx + c;
            i64 width = C - c < 128 ? C - c : 128, rows = R - r < br ? R - r : br;
            __m512i m = _mm512_setzero_si512();
            for (i64 k = 0; k < rows; k++, p += ldx) m = max_words(m, p, width);
            __m256i h = _mm256_max_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
            __m128i q = _mm_max_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
            amax[g] = ~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(q, _mm_set1_epi16(-1))));
            if ((c += 128) >= C) { c = 0; r += br; }
        }
        for (i64 g = 0; g < n; g += 16) {
            vf sc, mu, a = widen_words(_mm256_loadu_si256((const __m256i *)(amax + g)));
            scale_of(a, s, &sc, &mu);
            store(scale + g, sc); store(mult + g, mu);
            _mm256_storeu_si256((__m256i *)(below + g), below_words(a, sc, s));
        }
        if (scales) memcpy(scales + g0, scale, 4 * n);
        for (i64 g = 0; g < n; g++) {
            const uint16_t *p = x + r0 * ldx + c0;
            uint16_t *o = out + r0 * ldo + c0;
            i64 width = C - c0 < 128 ? C - c0 : 128, rows = R - r0 < br ? R - r0 : br;
            __m512i b = _mm512_set1_epi16((short)below[g]);
            for (i64 k = 0; k < rows; k++, p += ldx, o += ldo)
                if (below[g] != 0xffff) round_row(p, o, width, b, w);
                else
                    for (i64 i = 0; i < width; i += 16) store_bf(o + i, round_code(load_bf(p + i) * SPLAT(mult[g]), s) * SPLAT(scale[g]));
            if ((c0 += 128) >= C) { c0 = 0; r0 += br; }
        }
    }
}
/* blocks of br x 1, C a multiple of 32; row by row, so that memory is read in order */
static void quantize_columns(const uint16_t *x, i64 ldx, uint16_t *out, i64 ldo, float *scales, i64 R, i64 C, i64 br, const Spec *s) {
    enum { PANEL = 1024 };
    uint16_t amax[PANEL], below[PANEL];
    float scale[PANEL], mult[PANEL];
    Words w = words(s);
    for (i64 r0 = 0; r0 < R; r0 += br)
        for (i64 c0 = 0; c0 < C; c0 += PANEL) {
            const uint16_t *p = x + r0 * ldx + c0;
            uint16_t *o = out + r0 * ldo + c0;
            i64 rows = R - r0 < br ? R - r0 : br, n = C - c0 < PANEL ? C - c0 : PANEL, r = 0;
            memset(amax, 0, 2 * n);
            for (; r + 4 <= rows; r += 4)
                for (i64 c = 0; c < n; c += 32) {
                    __m512i m = _mm512_loadu_si512(amax + c);
                    for (int k = 0; k < 4; k++) m = _mm512_max_epu16(m, magnitude(_mm512_loadu_si512(p + (r + k) * ldx + c)));
                    _mm512_storeu_si512(amax + c, m);
                }
            for (; r < rows; r++)
                for (i64 c = 0; c < n; c += 32)
                    _mm512_storeu_si512(amax + c, _mm512_max_epu16(_mm512_loadu_si512(amax + c), magnitude(_mm512_loadu_si512(p + r * ldx + c))));
            __mmask16 general = 0;
            for (i64 c = 0; c < n; c += 16) {
                vf sc, mu, a = widen_words(_mm256_loadu_si256((const __m256i *)(amax + c)));
                scale_of(a, s, &sc, &mu);
                store(scale + c, sc); store(mult + c, mu);
                __m256i b = below_words(a, sc, s);
                general |= _mm256_cmpeq_epi16_mask(b, _mm256_set1_epi16(-1));
                _mm256_storeu_si256((__m256i *)(below + c), b);
            }
            if (scales) memcpy(scales + r0 / br * C + c0, scale, 4 * n);
            if (!general)
                for (r = 0; r < rows; r++)
                    for (i64 c = 0; c < n; c += 32)
                        _mm512_storeu_si512(o + r * ldo + c, round_words(_mm512_loadu_si512(p + r * ldx + c), _mm512_loadu_si512(below + c), w));
            else
                for (r = 0; r < rows; r++)
                    for (i64 c = 0; c < n; c += 16)
                        store_bf(o + r * ldo + c, round_code(load_bf(p + r * ldx + c) * load(mult + c), s) * load(scale + c));
        }
}
#endif
void quantize(const void *x, i64 ldx, int xbf, void *out, i64 ldo, int obf, float *scales, i64 R, i64 C, i64 br, i64 bc,
              int mode, const Spec *s) {
    const Spec spec = *s;
    int divide = !spec.apply && !spec.pow2; /* by a power of two, dividing and multiplying are the same */
#if defined(__AVX512BW__)
    if (xbf && obf && !mode && spec.pow2 && spec.mantissa < 7 && C % 32 == 0) {
        if (bc == 128 || (bc == C && C < 128)) { quantize_rows(x, ldx, out, ldo, scales, R, C, br, &spec); return; }
        if (bc == 1) { quantize_columns(x, ldx, out, ldo, scales, R, C, br, &spec); return; }
    }
#endif
    if (xbf && obf && !divide) {
        if (mode) quantize_as(x, ldx, 1, out, ldo, 1, scales, R, C, br, bc, 1, 0, spec);
        else quantize_as(x, ldx, 1, out, ldo, 1, scales, R, C, br, bc, 0, 0, spec);
    } else
        quantize_as(x, ldx, xbf, out, ldo, obf, scales, R, C, br, bc, mode, divide, spec);
}
