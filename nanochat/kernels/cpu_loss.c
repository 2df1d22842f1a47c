/* Policy losses on CPU in fp32: per row of logits its statistics, its token's loss, and the gradient in place of the
 * logits. Called from linear_policy_loss.py and linear_logprob.py, where the same is there for CUDA and in PyTorch.
 */
#include <string.h>

#include "cpu.h"

#define LOG_RATIO_LIMIT 20.0f

enum { REINFORCE, PPO_CLIP, CISPO };
enum { NO_KL, K1, K2, K3 };

typedef struct {
    long name, kl, with_gradient;
    float low, high, dual_clip, kl_coef, entropy_coef; /* dual_clip 0: none */
    float softcap, temperature;                        /* softcap 0: none */
} Loss;

static inline float limited(float x, float low, float high) { return x > high ? high : x < low ? low : x; }

/* The policy loss of a token and its derivative in the logprob, as autograd has it: a clamp passes the gradient at its
 * bounds, and a minimum of equals halves it. */
static float policy_term(const Loss *s, float logprob, float old, float advantage, float *slope)
{
    float log_ratio = logprob - old, within = limited(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
    float ratio = expf(within), clipped = limited(ratio, s->low, s->high);
    *slope = -advantage;
    if (s->name == REINFORCE)
        return -advantage * logprob;
    if (s->name == CISPO) {
        *slope = -clipped * advantage;
        return -clipped * advantage * logprob;
    }
    float gain = ratio * advantage, clipped_gain = clipped * advantage;
    float ratio_slope = within == log_ratio ? ratio : 0, clipped_slope = clipped == ratio ? ratio_slope : 0;
    float loss = -(gain < clipped_gain ? gain : clipped_gain), bound = -s->dual_clip * advantage;
    *slope = -advantage * (gain < clipped_gain    ? ratio_slope
                           : gain == clipped_gain ? 0.5f * (ratio_slope + clipped_slope)
                                                  : clipped_slope);
    if (s->dual_clip && advantage < 0 && loss >= bound) {
        *slope *= loss == bound ? 0.5f : 0;
        loss = bound;
    }
    return loss;
}

/* The KL estimate of a token and its derivative in the logprob. */
static float kl_term(const Loss *s, float logprob, float ref, float *slope)
{
    float difference = logprob - ref, within = limited(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
    *slope = s->kl == K1 ? 1 : s->kl == K2 ? difference : within == difference ? 1 - expf(-within) : 0;
    return s->kl == K1 ? difference : s->kl == K2 ? 0.5f * difference * difference : expf(-within) + within - 1;
}

/* Raw logits z (rows, V), rows `stride` apart -> losses, logprobs and entropies (rows) and, with a gradient, dL/dz in
 * place of z. targets, advantages, weights, old and ref logprobs (rows); old NULL: the current ones; ref NULL: no KL;
 * weights NULL: no loss.
 *
 * The derivative of a logit u with a softcap is 2 u (c - u) / (c S). */
void policy_rows(const Loss *s, float *z, long stride, long rows, long V, const long *targets, const float *advantages,
                 const float *weights, const float *old, const float *ref, float *losses, float *logprobs,
                 float *entropies, long threads)
{
    float S = s->softcap, c = 2 * S / s->temperature;
#pragma omp parallel num_threads(threads)
    {
        float *u = floats(V), *p = floats(V); /* the columns after V: -inf and 0 */
#pragma omp for schedule(static)
        for (long i = 0; i < rows; i++) {
            vec best = splat(-INFINITY), total = {0}, weighted = {0};
            memcpy(u, z + i * stride, V * sizeof(float));
            for (long j = 0; j < V; j += L)
                store(u + j, logit(load(u + j), S, s->temperature));
            for (long j = V; j < up(V); j++)
                u[j] = -INFINITY;
            for (long j = 0; j < V; j += L)
                best = larger(load(u + j), best);
            float highest = maximum(best);
            for (long j = 0; j < V; j += L) {
                vec x = load(u + j), weight = exponential(x - highest);
                store(p + j, weight);
                total += weight;
                weighted += weight * choose(x < -1e38f, (vec){0}, x);
            }
            float lse = highest + logf(sum(total)), entropy = lse - sum(weighted) / sum(total);
            float logprob = u[targets[i]] - lse, slope;
            logprobs[i] = logprob, entropies[i] = entropy;
            if (!weights)
                continue;
            float loss = policy_term(s, logprob, old ? old[i] : logprob, advantages[i], &slope), g = slope;
            if (ref) {
                loss += s->kl_coef * kl_term(s, logprob, ref[i], &slope);
                g += s->kl_coef * slope;
            }
            losses[i] = weights[i] * (loss - s->entropy_coef * entropy);
            if (!s->with_gradient)
                continue;
            float inverse = 1 / sum(total), b = -weights[i] * s->entropy_coef;
            g *= weights[i];
            for (long j = 0; j < V; j += L) {
                vec x = load(u + j), grad = load(p + j) * -inverse;
                grad *= b ? g + b * (choose(x < -1e38f, (vec){0}, x) - lse + entropy) : splat(g);
                store(p + j, grad);
            }
            p[targets[i]] += g;
            for (long j = 0; j < V; j += L) {
                vec x = load(u + j);
                store(p + j, load(p + j) * (S ? x * (c - x) * (2 / (c * S)) : splat(1 / s->temperature)));
            }
            memcpy(z + i * stride, p, V * sizeof(float));
        }
        free(u), free(p);
    }
}
