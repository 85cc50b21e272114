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
/* quantize.c; x [R, C] in blocks of br x bc -> codes x scale (mode 0) or codes (1), and scales or NULL */
void quantize(const void *x, i64 ldx, int xbf, void *out, i64 ldo, int obf, float *scales, i64 R, i64 C, i64 br, i64 bc,
              int mode, const Spec *spec);
#endif
