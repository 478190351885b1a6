/* triton_launch/tests/c_abi.c: plait/triton_c.h as C programs use it, with the pack of test_c_abi.py. Prints what goes wrong; the driver
 * writes down the rest. Usage: c_abi PACK CASE */
#include <plait/triton_c.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

extern void* __libc_malloc(size_t);
static _Thread_local size_t n_allocations;
void* malloc(size_t n) {
  ++n_allocations;
  return __libc_malloc(n);
}

static const char* path;
#define COUNT(a) (sizeof(a) / sizeof *(a))
#define FP32 PLAIT_TRITON_FP32

static plait_triton_stream stream(size_t n) { return (plait_triton_stream)n; }

static void told(plait_triton_status status) {
  const plait_triton_error* e = plait_triton_last_error();
  if (status == PLAIT_TRITON_OK)
    printf("fine\n");
  else
    printf("%d %s [%s] [%s] %d\n", status, e->message, e->kernel, e->specialization, e->argument);
}

static plait_triton_kernel* get(const char* name) {
  plait_triton_kernel* kernel = NULL;
  if (plait_triton_from_pack(path, name, &kernel) != PLAIT_TRITON_OK) told(PLAIT_TRITON_ERROR);
  return kernel;
}

static plait_triton_argument at(size_t address) { return plait_triton_pointer((const void*)address, FP32); }

/* Every kind of argument, and options. */
static void kinds(void) {
  plait_triton_kernel* kernel = get("kinds");
  const plait_triton_argument all[] = {
      at(16),
      plait_triton_integer(-3),
      plait_triton_natural(1ull << 63),
      plait_triton_number(2.5),
      plait_triton_boolean(7),
      plait_triton_none(),
      plait_triton_tuple(5),
      plait_triton_integer(32),
      plait_triton_tuple(2),
      plait_triton_number(1.5),
      plait_triton_integer(1),
      plait_triton_boolean(0),
      plait_triton_named("fn", plait_triton_function("twice")),
      plait_triton_named("kind", plait_triton_type(PLAIT_TRITON_FP16)),
      plait_triton_named("mode", plait_triton_string("a b")),
      plait_triton_constant(plait_triton_named("c", plait_triton_integer(5))),
  };
  plait_triton_config config = plait_triton_grid(2, 3, 4, stream(5));
  told(plait_triton_launch(kernel, &config, all, COUNT(all)));
  const plait_triton_argument named[] = {
      plait_triton_named("enable_fp_fusion", plait_triton_boolean(0)),
      plait_triton_named("a", plait_triton_number(0.5)),
      plait_triton_named("b", plait_triton_string("x")),
      plait_triton_named("z", plait_triton_none()),
  };
  const plait_triton_options* others = NULL;
  told(plait_triton_option_set(named, COUNT(named), &others));
  config.num_warps = 8;
  config.pdl = 1;
  config.others = others;
  told(plait_triton_launch(kernel, &config, all, COUNT(all)));
  config.grid[1] = 0;
  told(plait_triton_launch(kernel, &config, all, 1)); /* an empty grid launches nothing */
}

static void enter(void* user, const plait_triton_launched* l) {
  printf("%s %s %s %s warps %u grid %lld on %zu\n", (const char*)user, l->kernel, l->symbol, l->specialization,
         l->num_warps, (long long)l->grid[0], (size_t)l->stream);
}
static void* allocate(void* user, size_t nbytes, size_t alignment, plait_triton_stream s) {
  printf("allocate %zu by %zu on %zu\n", nbytes, alignment, (size_t)s);
  return user;
}

static void bound(void) {
  plait_triton_kernel* kernel = get("one");
  plait_triton_bound* resolved = NULL;
  const plait_triton_argument x = at(32);
  const plait_triton_config config = plait_triton_grid(7, 1, 1, NULL);
  told(plait_triton_bind(kernel, &config, &x, 1, &resolved));
  {
    const plait_triton_hooks hooks = {enter, NULL, (void*)"enter"};
    told(plait_triton_set_hooks(&hooks));
  }
  told(plait_triton_bound_launch(resolved, stream(3)));
  told(plait_triton_set_hooks(NULL));
  told(plait_triton_bound_launch(resolved, stream(4)));
  const plait_triton_argument other = at(64), number = plait_triton_integer(2);
  told(plait_triton_bound_set(resolved, 0, &other));
  told(plait_triton_bound_set(resolved, 0, &number));
  told(plait_triton_bound_set(resolved, 1, &other));
  told(plait_triton_bound_launch(resolved, stream(4)));
  struct CUgraphNode_st* node = (struct CUgraphNode_st*)3;
  told(plait_triton_bound_add_to(resolved, (struct CUgraph_st*)9, &node, 1, &node));
  told(plait_triton_bound_update(resolved, (struct CUgraphExec_st*)11, node));
  plait_triton_bound_free(resolved);
  plait_triton_bound_free(NULL);
  {
    const plait_triton_scratch scratch = {allocate, NULL, (void*)0x800};
    told(plait_triton_set_scratch(&scratch));
  }
  told(plait_triton_launch(get("scratch"), &config, &x, 1));
  told(plait_triton_set_scratch(NULL));
  char text[64];
  size_t needed = 0;
  told(plait_triton_signatures(text, sizeof text, &needed));
  printf("%s%zu\n", text, needed);
  told(plait_triton_signatures(text, 4, &needed));
  printf("%s %zu\n", text, needed);
  told(plait_triton_signatures(NULL, 0, &needed));
  const plait_triton_argument any = plait_triton_varying(x);
  told(plait_triton_prepare(get("two"), &config, &any, 1));
  told(plait_triton_signatures(text, sizeof text, &needed));
  printf("%s", text);
  plait_triton_counts before, after;
  plait_triton_count_hits(1);
  told(plait_triton_stats(&before, NULL, 0));
  told(plait_triton_launch(kernel, &config, &x, 1));
  told(plait_triton_stats(&after, text, 20));
  printf("%d %d %d [%s]\n", (int)(after.hits - before.hits), (int)after.misses, (int)after.loaded, text);
}

static void errors(void) {
  plait_triton_kernel *one = get("one"), *kernel = NULL;
  const plait_triton_config config = plait_triton_grid(1, 1, 1, NULL);
  if (plait_triton_last_error()) printf("too early\n");
  plait_triton_argument a[3] = {at(16), at(16), at(16)};
  told(plait_triton_from_pack(path, "nowhere", &kernel)); /* what is in the pack is seen at the first launch */
  told(plait_triton_launch(kernel, &config, a, 1));
  told(plait_triton_from_pack("/nowhere", "one", &kernel));
  told(plait_triton_from_pack(NULL, "one", &kernel));
  told(plait_triton_from_pack(path, "one", NULL));
  told(plait_triton_launch(NULL, &config, a, 1));
  told(plait_triton_launch(one, NULL, a, 1));
  told(plait_triton_launch(one, &config, NULL, 1));
  told(plait_triton_launch(one, &config, NULL, 0));
  told(plait_triton_launch(one, &config, a, 2));
  told(plait_triton_launch(one, &config, a, (size_t)1 << 40));
  a[0] = plait_triton_integer(5);
  told(plait_triton_launch(one, &config, a, 1));
  a[0] = plait_triton_named("y", at(16));
  told(plait_triton_launch(one, &config, a, 1));
  a[0].name = NULL;
  a[0].dtype = 19;
  told(plait_triton_launch(one, &config, a, 1));
  a[0].kind = 99;
  told(plait_triton_launch(one, &config, a, 1));
  a[0] = at(16);
  a[0].reserved[3] = 1;
  told(plait_triton_launch(one, &config, a, 1));
  a[0] = plait_triton_tuple(3);
  told(plait_triton_launch(one, &config, a, 3));
  a[0] = plait_triton_tuple(1);
  a[1].name = "x";
  told(plait_triton_launch(one, &config, a, 2));
  a[0] = plait_triton_string("");
  a[0].value.string = NULL;
  a[0].n = 5;
  told(plait_triton_launch(one, &config, a, 1));
  a[0] = plait_triton_string("f");
  told(plait_triton_launch(one, &config, a, 1));
  plait_triton_config old = config;
  old.size = 8;
  told(plait_triton_launch(one, &old, a, 1));
  const plait_triton_options* set = NULL;
  told(plait_triton_option_set(a, 1, &set));
  a[0] = plait_triton_named("f", plait_triton_function("f"));
  told(plait_triton_option_set(a, 1, &set));
  told(plait_triton_bind(one, &config, a, 1, NULL));
  told(plait_triton_bound_launch(NULL, NULL));
  told(plait_triton_option_set(NULL, 1, &set));
  told(plait_triton_signatures(NULL, 9, &(size_t){0}));
  told(plait_triton_stats(NULL, NULL, 0));
  plait_triton_bound* resolved = NULL;
  a[0] = at(16);
  told(plait_triton_bind(one, &config, a, 1, &resolved));
  struct CUgraphNode_st* node = NULL;
  told(plait_triton_bound_add_to(resolved, NULL, NULL, 1, &node));
  plait_triton_bound_free(resolved);
}

static plait_triton_status blocks(void* n, const plait_triton_meta* meta, int64_t* grid) {
  int64_t block = 0;
  const plait_triton_status status = plait_triton_meta_get(meta, n ? "BLOCK" : "nothing", &block);
  if (status == PLAIT_TRITON_OK) grid[0] = *(int64_t*)n / block;
  return status;
}

/* @triton.autotune, with grids that depend on what it chose. */
static void tuned(void) {
  plait_triton_kernel* kernel = get("tuned");
  int64_t n = 1024;
  plait_triton_argument arguments[] = {at(16), plait_triton_named("n", plait_triton_integer(n))};
  plait_triton_config config = plait_triton_grid(0, 0, 0, stream(5));
  config.grid_of = blocks;
  config.user = &n;
  told(plait_triton_set_tuning(PLAIT_TRITON_MISS_ERROR, NULL));
  told(plait_triton_launch(kernel, &config, arguments, 2));
  told(plait_triton_set_tuning(PLAIT_TRITON_MISS_TUNE, ""));
  told(plait_triton_launch(kernel, &config, arguments, 2));
  arguments[0].n = 4096;
  told(plait_triton_launch(kernel, &config, arguments, 2));
  const plait_triton_error* error = plait_triton_last_error();
  told(plait_triton_launch(kernel, &config, arguments, 2));
  if (plait_triton_last_error() != error) printf("a launch that succeeded changed the last error\n");
  plait_triton_bound* resolved = NULL;
  told(plait_triton_bind(kernel, &config, arguments, 2, &resolved));
  told(plait_triton_bound_launch(resolved, stream(6)));
  plait_triton_bound_free(resolved);
  config.user = NULL;
  told(plait_triton_launch(kernel, &config, arguments, 2));
  told(plait_triton_set_tuning((plait_triton_miss)3, NULL));
}

static void described(void) {
  plait_triton_kernel* kernel = get("described");
  plait_triton_descriptor d = {(const void*)512, FP32, 1, 2, {0}, {100, 64}, {80, 1}, {16, 32}};
  plait_triton_argument argument = plait_triton_described(&d);
  const plait_triton_config config = plait_triton_grid(1, 1, 1, NULL);
  told(plait_triton_launch(kernel, &config, &argument, 1));
  d.strides[1] = 2;
  told(plait_triton_launch(kernel, &config, &argument, 1));
  d.rank = 6;
  told(plait_triton_launch(kernel, &config, &argument, 1));
  argument.value.descriptor = NULL;
  told(plait_triton_launch(kernel, &config, &argument, 1));
}

static void* launch_often(void* n_errors) {
  plait_triton_kernel *one = get("one"), *kinds = get("texts");
  const plait_triton_config config = plait_triton_grid(1, 1, 1, NULL);
  const plait_triton_argument pointer = at(16), number = plait_triton_integer(5);
  size_t wrong = plait_triton_last_error() != NULL, warm = 0;
  for (int k = 0; k < 2000; ++k) {
    char name[] = "mode"; /* never where it was */
    plait_triton_argument two[] = {plait_triton_number(k + 0.5),
                                   plait_triton_named(name, plait_triton_string(k % 2 ? "a" : "b"))};
    plait_triton_argument with_tuple[] = {plait_triton_tuple(1), number,
                                          plait_triton_named("mode", plait_triton_string("a"))};
    if (k == 100) warm = n_allocations;
    wrong += plait_triton_launch(one, &config, &pointer, 1) != PLAIT_TRITON_OK;
    wrong += plait_triton_launch(one, &config, &number, 1) != PLAIT_TRITON_OK;
    wrong += plait_triton_launch(kinds, &config, two, 2) != PLAIT_TRITON_OK;
    wrong += plait_triton_launch(kinds, &config, with_tuple, 3) != PLAIT_TRITON_OK;
  }
  *(size_t*)n_errors = wrong + (n_allocations - warm);
  return NULL;
}

static void threads(void) {
  pthread_t all[4];
  size_t wrong[4];
  for (int k = 0; k < 4; ++k) pthread_create(&all[k], NULL, launch_often, &wrong[k]);
  for (int k = 0; k < 4; ++k) pthread_join(all[k], NULL);
  printf("%zu %zu %zu %zu\n", wrong[0], wrong[1], wrong[2], wrong[3]);
}

int main(int argc, char** argv) {
  (void)argc;
  path = argv[1];
  if (strcmp(argv[2], "kinds") == 0) kinds();
  if (strcmp(argv[2], "bound") == 0) bound();
  if (strcmp(argv[2], "errors") == 0) errors();
  if (strcmp(argv[2], "tuned") == 0) tuned();
  if (strcmp(argv[2], "described") == 0) described();
  if (strcmp(argv[2], "threads") == 0) threads();
  return 0;
}
