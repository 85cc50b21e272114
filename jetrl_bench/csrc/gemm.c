#include "scales.h"
#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
/* the same word twice: limits of 16 columns for a row_pair */
INLINE __m512i twice(const uint16_t *p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_or_si512(w, _mm512_slli_epi32(w, 16));
}
/* x [K, N] with the reduction running down the rows -> the same tiles; below [ceil K/128, N], or NULL: rounded on the way */
INLINE void pack_columns_as(const uint16_t *x, i64 ldx, i64 N, i64 K, uint16_t *out, const uint16_t *below, Words w) {
    i64 Kp = PAD(K, 32);
    for (i64 k = 0; k < K; k += 32)
        for (i64 n = 0; n < N; n += 32)
            for (i64 h = 0; h < 32; h += 16) {
                __m512i b = below ? twice(below + k / 128 * N + n + h) : _mm512_setzero_si512();
#pragma GCC unroll 1
                for (i64 p = 0; p < 16; p++) {
                    __m512i v = row_pair(x, ldx, k + 2 * p, K, n + h, N);
                    _mm512_storeu_si512(out + n * Kp + 32 * (k + h + p), below ? round_words(v, b, w) : v);
                }
            }
}
void pack_columns(const uint16_t *x, i64 ldx, i64 N, i64 K, uint16_t *out) { pack_columns_as(x, ldx, N, K, out, NULL, (Words){0}); }
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
/* x [T, C] -> out [ceil C/32 * 32, ceil T/32 * 32], zero padded; below as above */
INLINE void transpose_as(const uint16_t *x, i64 ldx, i64 T, i64 C, uint16_t *out, const uint16_t *below, Words w) {
    i64 Tp = PAD(T, 32);
    for (i64 t = 0; t < T; t += 32)
        for (i64 c = 0; c < PAD(C, 32); c += 16) {
            __m512i v[16];
            if (below) {
                __m512i b = twice(below + t / 128 * C + c);
#pragma GCC unroll 1
                for (int p = 0; p < 16; p++) v[p] = round_words(row_pair(x, ldx, t + 2 * p, T, c, C), b, w);
            } else
                for (int p = 0; p < 16; p++) v[p] = row_pair(x, ldx, t + 2 * p, T, c, C);
            swap_stage(v, 1); swap_stage(v, 2); swap_stage(v, 4); swap_stage(v, 8);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (c + i) * Tp + t, v[i]);
        }
}
static void tiles_on(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) { config.bytes[i] = 64; config.rows[i] = 16; }
    _tile_loadconfig(&config);
}
/* d [32, 32] = a [32, K] b^T, K a multiple of 32; half: only the first 16 rows of a */
INLINE void tile_product(const uint16_t *a, i64 lda, const uint16_t *b, i64 K, int half, float *d) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 k = 0; k < K; k += 32) {
        _tile_loadd(4, a + k, lda * 2); _tile_loadd(6, b + k * 32, 64); _tile_loadd(7, b + k * 32 + 512, 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        if (!half) { _tile_loadd(5, a + 16 * lda + k, lda * 2); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
    }
    _tile_stored(0, d, 128); _tile_stored(1, d + 16, 128);
    if (!half) { _tile_stored(2, d + 512, 128); _tile_stored(3, d + 528, 128); }
}
/* total [32, 32] (+)= part times the products of scales xs [rows] and ws [columns], each ld apart; xs NULL: unscaled */
INLINE void tile_add(float *total, const float *part, int first, const float *xs, const float *ws, i64 ld, i64 rows, i64 columns) {
    float scale[32] = {0};
    if (xs) for (i64 j = 0; j < columns; j++) scale[j] = ws[j * ld];
    for (i64 i = 0; i < rows; i++)
        for (i64 j = 0; j < 32; j += 16) {
            vf v = load(part + 32 * i + j);
            if (xs) v = v * (SPLAT(xs[i * ld]) * load(scale + j));
            store(total + 32 * i + j, first ? v : load(total + 32 * i + j) + v);
        }
}
/* x [M, K] rows, packed w, optional scales xs [M, nb], ws [N, nb], bias bf16 [N]; out bf16 or fp32 [M, N].
 * With spec, x is quantised first in groups of 1 x bc inside
 * each of P parts, 32 rows at a time. */
INLINE void gemm_tiles(const uint16_t *x, i64 ldx, i64 M, i64 K, const float *xs, const uint16_t *w, const float *ws, i64 N,
                       const uint16_t *bias, void *out, int obf, const Spec *spec, i64 bc, const i64 *parts, i64 P) {
    tiles_on();
    i64 Kp = PAD(K, 32), Kg = Kp + 32, nb = PAD(K, 128) / 128; /* Kg: a gap between rows, for the cache's sets */
    float part[1024] __attribute__((aligned(64))), total[1024] __attribute__((aligned(64)));
    uint16_t *rows = M % 32 || K % 32 || spec ? aligned_alloc(64, 64 * Kg) : NULL;
    if (rows && K % 32) memset(rows, 0, 64 * Kg);
    for (i64 m = 0; m < M; m += 32) {
        i64 mn = M - m < 32 ? M - m : 32, lda = ldx;
        const uint16_t *a = x + m * ldx;
        if (spec)
            for (i64 i = 0, c = 0; i < P; c += parts[i++])
                quantize(a + c, ldx, 1, rows + c, Kg, 1, NULL, mn, parts[i], 1, bc < parts[i] ? bc : parts[i], 0, spec);
        else if (mn < 32 || K % 32)
            for (i64 i = 0; i < mn; i++) memcpy(rows + i * Kg, a + i * ldx, 2 * K);
        if (spec || mn < 32 || K % 32) { a = rows; lda = Kg; }
        for (i64 n = 0; n < N; n += 32) {
            i64 nn = N - n < 32 ? N - n : 32;
            for (i64 k = 0, block = 0; k < Kp; k += 128, block++) {
                float *d = k || xs ? part : total;
                tile_product(a + k, lda, w + n * Kp + k * 32, Kp - k < 128 ? Kp - k : 128, mn <= 16, d);
                if (xs) tile_add(total, part, k == 0, xs + m * nb + block, ws + n * nb + block, nb, mn, nn);
                else if (k) tile_add(total, part, 0, NULL, NULL, 0, mn, 32);
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
          const uint16_t *bias, void *out, int obf, const Spec *spec, i64 bc, const i64 *parts, i64 P) {
    if (obf && !xs && !bias) gemm_tiles(x, ldx, M, K, NULL, w, NULL, N, NULL, out, 1, spec, bc, parts, P);
    else gemm_tiles(x, ldx, M, K, xs, w, ws, N, bias, out, obf, spec, bc, parts, P);
}
/* limits of x [T, C] in blocks of 128 x 1; 0: some column takes the general way */
static int all_limits(const uint16_t *x, i64 ldx, i64 T, i64 C, const Spec *spec, uint16_t *below) {
    for (i64 t = 0; t < T; t += 128)
        for (i64 c = 0; c < C; c += PANEL)
            if (column_limits(x + t * ldx + c, ldx, T - t < 128 ? T - t : 128, C - c < PANEL ? C - c : PANEL, spec, below + t / 128 * C + c, NULL, NULL))
                return 0;
    return 1;
}
enum { STRIPE = 256, GAP = 32 }; /* tokens whose packed operands stay in the cache; a gap between rows, for its sets */
/* `left`: transpose, or pack_columns, of STRIPE tokens; with spec quantised first, on the way where that is possible */
static void pack_stripe(const uint16_t *x, i64 ldx, i64 T, i64 C, const Spec *spec, uint16_t *codes, uint16_t *below, int left, uint16_t *out) {
    if (spec && on_words(spec, C) && all_limits(x, ldx, T, C, spec, below)) {
        if (left) transpose_as(x, ldx, T, C, out, below, words(spec));
        else pack_columns_as(x, ldx, C, T, out, below, words(spec));
        return;
    }
    if (spec) { quantize(x, ldx, 1, codes, C + GAP, 1, NULL, T, C, 128, 1, 0, spec); x = codes; ldx = C + GAP; }
    if (left) transpose_as(x, ldx, T, C, out, NULL, (Words){0});
    else pack_columns(x, ldx, C, T, out);
}
/* a [T, M], b [T, N] -> fp32 [M, N], the sum running over T; scales as [M, nb], [N, nb] or NULL. With spec, both are
 * quantised first in groups of 128 x 1. */
void gemm_tokens(const uint16_t *a, i64 lda, i64 M, const float *as, const uint16_t *b, i64 ldb, i64 N, const float *bs, i64 T,
                 float *out, const Spec *spec) {
    tiles_on();
    i64 Mp = PAD(M, 32), Np = PAD(N, 32), nb = PAD(T, 128) / 128, wide = (Mp > Np ? Mp : Np) + GAP;
    float part[1024] __attribute__((aligned(64)));
    float *sums = aligned_alloc(64, 4 * Mp * Np);
    uint16_t *at = aligned_alloc(64, 2 * STRIPE * (Mp + Np + wide) + 4 * wide), *bp = at + STRIPE * Mp, *codes = bp + STRIPE * Np,
             *below = codes + STRIPE * wide;
    for (i64 t0 = 0; t0 < T; t0 += STRIPE) {
        i64 L = T - t0 < STRIPE ? T - t0 : STRIPE, Lp = PAD(L, 32);
        pack_stripe(a + t0 * lda, lda, L, M, spec, codes, below, 1, at);
        pack_stripe(b + t0 * ldb, ldb, L, N, spec, codes, below, 0, bp);
        for (i64 m = 0; m < M; m += 32)
            for (i64 n = 0; n < N; n += 32) {
                float *total = sums + m * Np + 32 * n;
                for (i64 k = 0; k < Lp; k += 128) {
                    i64 block = (t0 + k) / 128;
                    tile_product(at + m * Lp + k, Lp, bp + n * Lp + k * 32, Lp - k < 128 ? Lp - k : 128, M - m <= 16, block ? part : total);
                    if (as) tile_add(total, block ? part : total, !block, as + m * nb + block, bs + n * nb + block, nb,
                                     M - m < 32 ? M - m : 32, N - n < 32 ? N - n : 32);
                    else if (block) tile_add(total, part, 0, NULL, NULL, 0, M - m < 32 ? M - m : 32, 32);
                }
            }
    }
    _tile_release();
    for (i64 m = 0; m < M; m++)
        for (i64 n = 0; n < N; n += 32)
            memcpy(out + m * N + n, sums + m / 32 * 32 * Np + 32 * n + m % 32 * 32, 4 * (N - n < 32 ? N - n : 32));
    free(at);
    free(sums);
}
#else
int amx_start(void) { return -1; }
#endif
