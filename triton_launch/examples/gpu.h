/* triton_launch/examples/gpu.h: memory on the GPU, for C and C++. A program of your own has that
 * already, from the CUDA runtime or as tensors; here the driver is asked, found at run time, so
 * that no CUDA toolkit is needed. */
#ifndef GPU_H
#define GPU_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void* gpu_function(const char* name) {
  static void* driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
  void* found = driver ? dlsym(driver, name) : NULL;
  if (!found) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return found;
}

static void gpu_check(int status, const char* what) {
  if (status == 0) return;
  fprintf(stderr, "%s: the driver says %d\n", what, status);
  exit(1);
}

/* The first GPU is this thread's from now on. */
static void gpu_open(void) {
  void* context = NULL;
  gpu_check(((int (*)(unsigned))gpu_function("cuInit"))(0), "cuInit");
  gpu_check(((int (*)(void**, int))gpu_function("cuDevicePrimaryCtxRetain"))(&context, 0),
            "a context");
  gpu_check(((int (*)(void*))gpu_function("cuCtxSetCurrent"))(context), "a context");
}

/* A copy on the GPU, which is never freed. */
static float* gpu_copy_of(const float* values, size_t n) {
  uint64_t memory = 0;
  gpu_check(((int (*)(uint64_t*, size_t))gpu_function("cuMemAlloc_v2"))(&memory, n * sizeof(float)),
            "memory");
  gpu_check(((int (*)(uint64_t, const void*, size_t))gpu_function("cuMemcpyHtoD_v2"))(
                memory, values, n * sizeof(float)),
            "a copy");
  return (float*)(uintptr_t)memory;
}

/* What lies on the GPU, when all that was launched before is done. */
static void gpu_read(float* values, const float* memory, size_t n) {
  gpu_check(((int (*)(void*, uint64_t, size_t))gpu_function("cuMemcpyDtoH_v2"))(
                values, (uint64_t)(uintptr_t)memory, n * sizeof(float)),
            "a copy");
}

#endif
