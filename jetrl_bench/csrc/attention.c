#include "scales.h"

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
        vf e = exp_above(-40.0f, load(s + j) - top);
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
/* For another attention (layers.py): q [S, L, Hq, D], k and v [S, L, Hkv, D] after RoPE and KV quantisation, zero beyond
 * a sequence's end. */
void split_heads(const uint16_t *qkv, const i64 *starts, i64 S, i64 L, const Heads *hp, const float *cos, const float *sin,
                 const Spec *kvspec, uint16_t *q, uint16_t *k, uint16_t *v) {
    const Heads h = *hp;
    i64 D = h.D, half = D / 2, nq = h.Hq * D, nk = h.Hkv * D;
    float a[2 * PAD(D, 16)], *b = a + PAD(D, 16);
    for (i64 s = 0; s < S; s++)
        for (i64 t = 0; t < L; t++, q += nq, k += nk, v += nk) {
            const uint16_t *row = qkv + (starts[s] + t) * h.ld;
            if (t >= starts[s + 1] - starts[s]) { memset(q, 0, 2 * nq); memset(k, 0, 2 * nk); memset(v, 0, 2 * nk); continue; }
            for (i64 i = 0; i < h.Hq; i++) {
                rope_row(row + i * D, cos + t * half, sin + t * half, D, a);
                for (i64 d = 0; d < D; d += 16) tail_store_bf(q + i * D + d, load(a + d), D - d);
            }
            for (i64 i = 0; i < h.Hkv; i++) {
                key_row(row, i, &h, cos + t * half, sin + t * half, kvspec, a, b);
                for (i64 d = 0; d < D; d += 16) {
                    tail_store_bf(k + i * D + d, load(a + d), D - d);
                    tail_store_bf(v + i * D + d, load(b + d), D - d);
                }
            }
        }
}
/* Its gradient: dq, dk, dv fp32 of the same shapes, rounded to bf16 first -> dqkv [T, ld] */
void join_heads(const float *dq, const float *dk, const float *dv, const i64 *starts, i64 S, i64 L, const Heads *hp,
                const float *cos, const float *sin, uint16_t *dqkv) {
    const Heads h = *hp;
    i64 D = h.D, half = D / 2;
    float a[PAD(D, 16)];
    for (i64 s = 0; s < S; s++)
        for (i64 t = 0; t < starts[s + 1] - starts[s]; t++) {
            uint16_t *row = dqkv + (starts[s] + t) * h.ld;
            i64 q0 = (s * L + t) * h.Hq * D, k0 = (s * L + t) * h.Hkv * D;
            for (i64 i = 0; i < h.Hq + h.Hkv; i++) {
                const float *from = i < h.Hq ? dq + q0 + i * D : dk + k0 + (i - h.Hq) * D;
                for (i64 d = 0; d < D; d += 16) store(a + d, to_bf(tail_load(from + d, D - d)));
                unrope_row(a, cos + t * half, sin + t * half, D, row + i * D);
            }
            for (i64 d = 0; d < h.Hkv * D; d += 16)
                tail_store_bf(row + (h.Hq + h.Hkv) * D + d, tail_load(dv + k0 + d, h.Hkv * D - d), h.Hkv * D - d);
        }
}
