/* A training step allocates the same megabytes again and again. By default glibc returns blocks of that size to the
 * kernel when they are freed and has them faulted in again page by page: 4 % of a step. Keep them. */
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>

__attribute__((constructor)) static void keep_freed_memory(void) {
    mallopt(M_MMAP_THRESHOLD, 32 << 20); /* the most it takes */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
}
#endif
