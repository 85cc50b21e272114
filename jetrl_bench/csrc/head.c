#include "vectors.h"

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
