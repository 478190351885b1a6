/* plait/triton_c.h: Triton kernels from C, and from every language that calls C, for what a bare
 * launch costs.
 *
 *   plait_triton_kernel* add;
 *   plait_triton_from_pack("kernels.pack", "add_kernel", &add);
 *   const plait_triton_argument arguments[] = {
 *       plait_triton_pointer(x, PLAIT_TRITON_FP32), plait_triton_pointer(y, PLAIT_TRITON_FP32),
 *       plait_triton_pointer(out, PLAIT_TRITON_FP32), plait_triton_integer(n),
 *       plait_triton_named("BLOCK", plait_triton_integer(1024))};
 *   const plait_triton_config config = plait_triton_grid(blocks, 1, 1, stream);
 *   if (plait_triton_launch(add, &config, arguments, 5) != PLAIT_TRITON_OK)
 *     fprintf(stderr, "%s\n", plait_triton_last_error()->message);
 *
 * C11; the library is libplait_core.so, the target plait::core. plait/triton.h is the same for C++,
 * and triton_launch/README.md describes both. Threads may call everything here. Text is UTF-8 and
 * ends with a zero; it is copied. What fails returns a status and leaves the rest in
 * plait_triton_last_error(); no exception gets out. Layouts and numbers never change;
 * PLAIT_TRITON_ABI counts what was added. */
#ifndef PLAIT_TRITON_C_H
#define PLAIT_TRITON_C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PLAIT_TRITON_ABI 2
#define PLAIT_TRITON_C __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* The PLAIT_TRITON_ABI of the library; a program needs at least that of the header it was made
 * with. */
PLAIT_TRITON_C uint32_t plait_triton_abi(void);

typedef struct CUstream_st* plait_triton_stream; /* CUstream, cudaStream_t */

typedef enum plait_triton_status {
  PLAIT_TRITON_OK = 0,
  PLAIT_TRITON_ERROR = 1,   /* the kernel cannot be found, compiled or launched like this */
  PLAIT_TRITON_INVALID = 2, /* an argument of the function itself means nothing */
  PLAIT_TRITON_NO_MEMORY = 3
} plait_triton_status;

/* All texts are there, perhaps empty. argument: its index in the Python signature, or -1. */
typedef struct plait_triton_error {
  const char* message; /* with all that follows in it */
  const char* kernel;
  const char* specialization;
  const char* traceback; /* Python's */
  int32_t argument;
} plait_triton_error;
/* What failed last in this thread, until the next failure; NULL if nothing did. */
PLAIT_TRITON_C const plait_triton_error* plait_triton_last_error(void);

/* A function of a Python file or of a pack. The same function is the same kernel; it is never
 * freed. Nothing is compiled before the first launch. */
typedef struct plait_triton_kernel plait_triton_kernel;
/* python: the Python that compiles what is missing, in a process of its own; NULL is "python3", ""
 * the Python that runs in this process. */
PLAIT_TRITON_C plait_triton_status plait_triton_jit(const char* file, const char* function,
                                                    const char* python,
                                                    plait_triton_kernel** kernel);
PLAIT_TRITON_C plait_triton_status plait_triton_from_pack(const char* path, const char* function,
                                                          plait_triton_kernel** kernel);

typedef enum plait_triton_dtype {
  PLAIT_TRITON_U1 = 1,
  PLAIT_TRITON_I8,
  PLAIT_TRITON_I16,
  PLAIT_TRITON_I32,
  PLAIT_TRITON_I64,
  PLAIT_TRITON_U8,
  PLAIT_TRITON_U16,
  PLAIT_TRITON_U32,
  PLAIT_TRITON_U64,
  PLAIT_TRITON_FP16,
  PLAIT_TRITON_BF16,
  PLAIT_TRITON_FP32,
  PLAIT_TRITON_FP64,
  PLAIT_TRITON_FP8E4NV,
  PLAIT_TRITON_FP8E5,
  PLAIT_TRITON_FP8E4B15,
  PLAIT_TRITON_FP8E4B8,
  PLAIT_TRITON_FP8E5B16
} plait_triton_dtype;

typedef enum plait_triton_kind {
  PLAIT_TRITON_NONE = 0, /* None */
  PLAIT_TRITON_POINTER,  /* value.pointer: device memory of dtype, of n bytes if @triton.autotune
                            wants to know */
  PLAIT_TRITON_INTEGER,  /* value.integer */
  PLAIT_TRITON_NATURAL,  /* value.natural: an integer beyond int64_t, perhaps */
  PLAIT_TRITON_NUMBER,   /* value.number */
  PLAIT_TRITON_BOOLEAN,  /* value.integer, 0 or not */
  PLAIT_TRITON_DTYPE,    /* dtype: a tl.dtype */
  PLAIT_TRITON_STRING,   /* value.string, of n bytes */
  PLAIT_TRITON_FUNCTION, /* value.string, of n bytes: a @triton.jit function of the kernel's file */
  PLAIT_TRITON_TUPLE,    /* the n arguments that follow, those in tuples among them included */
  PLAIT_TRITON_DESCRIPTOR /* value.descriptor */
} plait_triton_kind;

/* triton.tools.tensor_descriptor.TensorDescriptor; strides count elements. */
typedef struct plait_triton_descriptor {
  const void* base;
  uint8_t dtype;       /* plait_triton_dtype */
  uint8_t nan;         /* 1: padding is NaN, not zero */
  uint8_t rank;        /* at most 5 */
  uint8_t reserved[5]; /* 0 */
  int64_t shape[5], strides[5], block_shape[5];
} plait_triton_descriptor;

/* One argument, specialized exactly as Triton does it. The functions below make them. */
typedef struct plait_triton_argument {
  uint8_t kind; /* plait_triton_kind */
  uint8_t dtype;
  uint8_t constant;    /* 1: a tl.constexpr, whatever the signature says of its parameter */
  uint8_t varies;      /* 1: for plait_triton_prepare */
  uint8_t reserved[4]; /* 0 */
  const char* name;    /* of a keyword argument, or NULL */
  union {
    const void* pointer;
    int64_t integer;
    uint64_t natural;
    double number;
    const char* string;
    const plait_triton_descriptor* descriptor;
  } value;
  uint64_t n;
} plait_triton_argument;

/* Options of the compiler that the configuration does not name: arguments with names. Equal sets
 * are one, kept for good. */
typedef struct plait_triton_options plait_triton_options;
PLAIT_TRITON_C plait_triton_status plait_triton_option_set(const plait_triton_argument* options,
                                                           size_t n,
                                                           const plait_triton_options** set);

/* The parameters of a kernel, those that decorators set too: what a grid may depend on. */
typedef struct plait_triton_meta plait_triton_meta;
/* An integer or bool among them. */
PLAIT_TRITON_C plait_triton_status plait_triton_meta_get(const plait_triton_meta* meta,
                                                         const char* parameter, int64_t* value);

/* An empty grid launches nothing. A number that is 0 is left to Triton. */
typedef struct plait_triton_config {
  uint32_t size; /* sizeof(plait_triton_config) */
  uint8_t cooperative, pdl;
  uint16_t reserved; /* 0 */
  int64_t grid[3];
  plait_triton_stream stream;
  int16_t num_warps, num_stages, num_ctas, maxnreg;
  const plait_triton_options* others; /* or NULL */
  /* Not NULL: says the grid instead; its grid holds 1, 1, 1 before. What it returns but OK fails
   * the launch. */
  plait_triton_status (*grid_of)(void* user, const plait_triton_meta* meta, int64_t* grid);
  void* user;
} plait_triton_config;

/* Allocates nothing and takes no lock where the same types, constants, alignment and so on were
 * launched before. */
PLAIT_TRITON_C plait_triton_status plait_triton_launch(plait_triton_kernel* kernel,
                                                       const plait_triton_config* config,
                                                       const plait_triton_argument* arguments,
                                                       size_t n);

/* Compiles and loads what such a launch needs. An argument that varies stands for all values that
 * make another kernel: 1, multiples of 16 and others; aligned memory and other memory. */
PLAIT_TRITON_C plait_triton_status plait_triton_prepare(plait_triton_kernel* kernel,
                                                        const plait_triton_config* config,
                                                        const plait_triton_argument* arguments,
                                                        size_t n);

/* A launch that is resolved: kernel, arguments and grid are fixed. It belongs to the context that
 * was current: a thread that has none gets this one, in another one it is an error. */
typedef struct plait_triton_bound plait_triton_bound;
PLAIT_TRITON_C plait_triton_status plait_triton_bind(plait_triton_kernel* kernel,
                                                     const plait_triton_config* config,
                                                     const plait_triton_argument* arguments,
                                                     size_t n, plait_triton_bound** bound);
PLAIT_TRITON_C plait_triton_status plait_triton_bound_launch(const plait_triton_bound* bound,
                                                             plait_triton_stream stream);
/* Gives arguments[index] another value of its kind, but no text or tuple; no thread may launch it
 * meanwhile. */
PLAIT_TRITON_C plait_triton_status plait_triton_bound_set(plait_triton_bound* bound, size_t index,
                                                          const plait_triton_argument* value);
/* A node of a graph that launches it, behind the nodes that are given; and such a node, or one that
 * capturing it made, as it is now. */
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;
PLAIT_TRITON_C plait_triton_status plait_triton_bound_add_to(const plait_triton_bound* bound,
                                                             struct CUgraph_st* graph,
                                                             struct CUgraphNode_st* const* behind,
                                                             size_t n_behind,
                                                             struct CUgraphNode_st** node);
PLAIT_TRITON_C plait_triton_status plait_triton_bound_update(const plait_triton_bound* bound,
                                                             struct CUgraphExec_st* graph,
                                                             struct CUgraphNode_st* node);
PLAIT_TRITON_C void plait_triton_bound_free(plait_triton_bound* bound); /* NULL is nothing */

/* Scratch memory of kernels that want some, ordered as the stream is; NULL: the driver's
 * cuMemAllocAsync again. free may be NULL. No exception may leave these functions, nor those of
 * hooks. */
typedef struct plait_triton_scratch {
  void* (*allocate)(void* user, size_t nbytes, size_t alignment, plait_triton_stream stream);
  void (*free)(void* user, void* memory, plait_triton_stream stream);
  void* user;
} plait_triton_scratch;
PLAIT_TRITON_C plait_triton_status plait_triton_set_scratch(const plait_triton_scratch* scratch);

typedef struct plait_triton_launched {
  const char *kernel, *symbol, *specialization;
  uint32_t num_warps, num_ctas, shared;
  int64_t grid[3];
  plait_triton_stream stream;
} plait_triton_launched;
/* Called before and after every launch from now on; NULL: no more. Each may be NULL. */
typedef struct plait_triton_hooks {
  void (*enter)(void* user, const plait_triton_launched* launched);
  void (*exit)(void* user, const plait_triton_launched* launched);
  void* user;
} plait_triton_hooks;
PLAIT_TRITON_C plait_triton_status plait_triton_set_hooks(const plait_triton_hooks* hooks);

/* What happens to a call of an @triton.autotune function whose key was not met before: its
 * configurations are timed, it gets the first one, or it fails. */
typedef enum plait_triton_miss {
  PLAIT_TRITON_MISS_TUNE = 0,
  PLAIT_TRITON_MISS_FIRST = 1,
  PLAIT_TRITON_MISS_ERROR = 2
} plait_triton_miss;
/* folder: where choices are kept; NULL: where plait keeps what it tunes; "": nowhere. */
PLAIT_TRITON_C plait_triton_status plait_triton_set_tuning(plait_triton_miss on_miss,
                                                           const char* folder);

/* Signatures of all that is compiled so far, a line each, as `plait pack --signatures` takes them.
 * Writes what fits into `size` bytes, the last one zero; `needed` is what all of it takes. */
PLAIT_TRITON_C plait_triton_status plait_triton_signatures(char* text, size_t size, size_t* needed);

/* What calls of this process met; since version 2. hits: counted after plait_triton_count_hits(1).
 * misses: calls whose key was new to their place. last_miss: as much of what the last one was as
 * fits into `size` bytes, the last one zero. */
typedef struct plait_triton_counts {
  uint64_t hits, misses, compiled, loaded, tuned;
} plait_triton_counts;
PLAIT_TRITON_C plait_triton_status plait_triton_stats(plait_triton_counts* counts, char* last_miss,
                                                      size_t size);
PLAIT_TRITON_C void plait_triton_count_hits(int on);

static inline plait_triton_config plait_triton_grid(int64_t x, int64_t y, int64_t z,
                                                    plait_triton_stream stream) {
  plait_triton_config config;
  memset(&config, 0, sizeof config);
  config.size = sizeof config;
  config.grid[0] = x;
  config.grid[1] = y;
  config.grid[2] = z;
  config.stream = stream;
  return config;
}

static inline plait_triton_argument plait_triton_none(void) {
  plait_triton_argument made;
  memset(&made, 0, sizeof made);
  return made;
}
static inline plait_triton_argument plait_triton_pointer(const void* pointer,
                                                         plait_triton_dtype dtype) {
  plait_triton_argument made = plait_triton_none();
  made.kind = PLAIT_TRITON_POINTER;
  made.dtype = (uint8_t)dtype;
  made.value.pointer = pointer;
  return made;
}
static inline plait_triton_argument plait_triton_integer(int64_t value) {
  plait_triton_argument made = plait_triton_none();
  made.kind = PLAIT_TRITON_INTEGER;
  made.value.integer = value;
  return made;
}
static inline plait_triton_argument plait_triton_natural(uint64_t value) {
  plait_triton_argument made = plait_triton_none();
  made.kind = PLAIT_TRITON_NATURAL;
  made.value.natural = value;
  return made;
}
static inline plait_triton_argument plait_triton_number(double value) {
  plait_triton_argument made = plait_triton_none();
  made.kind = PLAIT_TRITON_NUMBER;
  made.value.number = value;
  return made;
}
static inline plait_triton_argument plait_triton_boolean(int value) {
  plait_triton_argument made = plait_triton_integer(value != 0);
  made.kind = PLAIT_TRITON_BOOLEAN;
  return made;
}
static inline plait_triton_argument plait_triton_type(plait_triton_dtype dtype) {
  plait_triton_argument made = plait_triton_pointer(NULL, dtype);
  made.kind = PLAIT_TRITON_DTYPE;
  return made;
}
static inline plait_triton_argument plait_triton_string(const char* text) {
  plait_triton_argument made = plait_triton_none();
  made.kind = PLAIT_TRITON_STRING;
  made.n = strlen(text);
  made.value.string = text;
  return made;
}
static inline plait_triton_argument plait_triton_function(const char* name) {
  plait_triton_argument made = plait_triton_string(name);
  made.kind = PLAIT_TRITON_FUNCTION;
  return made;
}
static inline plait_triton_argument plait_triton_tuple(uint64_t n_following) {
  plait_triton_argument made = plait_triton_none();
  made.kind = PLAIT_TRITON_TUPLE;
  made.n = n_following;
  return made;
}
static inline plait_triton_argument plait_triton_described(
    const plait_triton_descriptor* descriptor) {
  plait_triton_argument made = plait_triton_none();
  made.kind = PLAIT_TRITON_DESCRIPTOR;
  made.value.descriptor = descriptor;
  return made;
}
static inline plait_triton_argument plait_triton_constant(plait_triton_argument argument) {
  argument.constant = 1;
  return argument;
}
static inline plait_triton_argument plait_triton_varying(plait_triton_argument argument) {
  argument.varies = 1;
  return argument;
}
static inline plait_triton_argument plait_triton_named(const char* name,
                                                       plait_triton_argument argument) {
  argument.name = name;
  return argument;
}

#ifdef __cplusplus
}
#endif
#endif
