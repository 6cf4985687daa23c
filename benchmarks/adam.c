/* The ceiling: AdamW on one flat tensor as a plain loop, which the compiler vectorizes. Bias corrections are in rate and eps. */
#include <math.h>

void adamw(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, long n, int threads,
           float b1, float b2, float rate, float eps, float keep) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (long i = 0; i < n; i++) {
        float mean = m[i] + (1 - b1) * (g[i] - m[i]);
        float square = b2 * v[i] + (1 - b2) * g[i] * g[i];
        m[i] = mean;
        v[i] = square;
        p[i] = keep * p[i] - rate * mean / (sqrtf(square) + eps);
    }
}
