/* triton_launch/examples/launch.c: a Triton kernel launched from C. Usage as launch.cpp's: launch_c KERNELS [PYTHON] */
#include <math.h>
#include <plait/triton_c.h>

#include "gpu.h"

#define N 100000
#define BLOCK 1024

static void check(plait_triton_status status) {
  if (status == PLAIT_TRITON_OK) return;
  fprintf(stderr, "%s\n", plait_triton_last_error()->message);
  exit(1);
}

int main(int argc, char** argv) {
  static float x[N], y[N], out[N];
  if (argc < 2) return fprintf(stderr, "usage: %s KERNELS [PYTHON]\n", argv[0]), 2;
  for (int i = 0; i < N; ++i) {
    x[i] = (float)sin(i);
    y[i] = (float)i;
  }
  gpu_open();
  float* out_gpu = gpu_copy_of(out, N);

  plait_triton_kernel* add;
  const char* dot = strrchr(argv[1], '.');
  if (dot && strcmp(dot, ".py") == 0)
    check(plait_triton_jit(argv[1], "add_kernel", argc > 2 ? argv[2] : NULL, &add));
  else
    check(plait_triton_from_pack(argv[1], "add_kernel", &add));
  const plait_triton_argument arguments[] = {
      plait_triton_pointer(gpu_copy_of(x, N), PLAIT_TRITON_FP32),
      plait_triton_pointer(gpu_copy_of(y, N), PLAIT_TRITON_FP32),
      plait_triton_pointer(out_gpu, PLAIT_TRITON_FP32),
      plait_triton_integer(N),
      plait_triton_named("BLOCK", plait_triton_integer(BLOCK)),
  };
  const plait_triton_config config = plait_triton_grid((N + BLOCK - 1) / BLOCK, 1, 1, NULL);
  check(plait_triton_launch(add, &config, arguments, 5));

  gpu_read(out, out_gpu, N);
  double error = 0;
  for (int i = 0; i < N; ++i) error = fmax(error, fabs((double)x[i] + y[i] - out[i]) / (1 + y[i]));
  printf("add: largest error %.1e\n", error);
  return error < 1e-6 ? 0 : 1;
}
