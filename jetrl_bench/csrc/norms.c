#include "vectors.h"

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
