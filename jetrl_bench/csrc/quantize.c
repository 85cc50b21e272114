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
int column_limits(const uint16_t *x, i64 ldx, i64 rows, i64 n, const Spec *s, uint16_t *below, float *scale, float *mult) {
    uint16_t amax[PANEL];
    i64 r = 0;
    memset(amax, 0, 2 * n);
    for (; r + 4 <= rows; r += 4) /* row by row, so that memory is read in order */
        for (i64 c = 0; c < n; c += 32) {
            __m512i m = _mm512_loadu_si512(amax + c);
            for (int k = 0; k < 4; k++) m = _mm512_max_epu16(m, magnitude(_mm512_loadu_si512(x + (r + k) * ldx + c)));
            _mm512_storeu_si512(amax + c, m);
        }
    for (; r < rows; r++)
        for (i64 c = 0; c < n; c += 32)
            _mm512_storeu_si512(amax + c, _mm512_max_epu16(_mm512_loadu_si512(amax + c), magnitude(_mm512_loadu_si512(x + r * ldx + c))));
    __mmask16 general = 0;
    for (i64 c = 0; c < n; c += 16) {
        vf sc, mu, a = widen_words(_mm256_loadu_si256((const __m256i *)(amax + c)));
        scale_of(a, s, &sc, &mu);
        if (scale) { store(scale + c, sc); store(mult + c, mu); }
        __m256i b = below_words(a, sc, s);
        general |= _mm256_cmpeq_epi16_mask(b, _mm256_set1_epi16(-1));
        _mm256_storeu_si256((__m256i *)(below + c), b);
    }
    return general != 0;
}
/* blocks of br x 1, C a multiple of 32 */
static void quantize_columns(const uint16_t *x, i64 ldx, uint16_t *out, i64 ldo, float *scales, i64 R, i64 C, i64 br, const Spec *s) {
    uint16_t below[PANEL];
    float scale[PANEL], mult[PANEL];
    Words w = words(s);
    for (i64 r0 = 0; r0 < R; r0 += br)
        for (i64 c0 = 0; c0 < C; c0 += PANEL) {
            const uint16_t *p = x + r0 * ldx + c0;
            uint16_t *o = out + r0 * ldo + c0;
            i64 rows = R - r0 < br ? R - r0 : br, n = C - c0 < PANEL ? C - c0 : PANEL;
            int general = column_limits(p, ldx, rows, n, s, below, scale, mult);
            if (scales) memcpy(scales + r0 / br * C + c0, scale, 4 * n);
            for (i64 r = 0; r < rows; r++, p += ldx, o += ldo)
                if (!general)
                    for (i64 c = 0; c < n; c += 32)
                        _mm512_storeu_si512(o + c, round_words(_mm512_loadu_si512(p + c), _mm512_loadu_si512(below + c), w));
                else
                    for (i64 c = 0; c < n; c += 16)
                        store_bf(o + c, round_code(load_bf(p + c) * load(mult + c), s) * load(scale + c));
        }
}
#endif
void quantize(const void *x, i64 ldx, int xbf, void *out, i64 ldo, int obf, float *scales, i64 R, i64 C, i64 br, i64 bc,
              int mode, const Spec *s) {
    const Spec spec = *s;
    int divide = !spec.apply && !spec.pow2; /* by a power of two, dividing and multiplying are the same */
#if defined(__AVX512BW__)
    if (xbf && obf && !mode && on_words(&spec, C)) {
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
