// native/core/cuda.h: compiled GPU kernels, loaded and launched through the CUDA driver, or through
// the driver of another maker, whose functions stand in the same places (drivers/).
//
// Needs neither headers nor a driver to build: the library is found when first asked for, so one
// binary serves machines with and without a GPU. Everything that a launch needs besides its
// arguments is prepared when the kernel is loaded; a launch copies nothing but the grid and the
// stream. A current context is the caller's business.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace plait::cuda {

// The driver said no. `code` is its CUresult.
struct DriverError : std::runtime_error {
  DriverError(int code, const std::string& text) : std::runtime_error(text), code(code) {}
  int code;
};

// A kernel wants more of something than the device has.
struct OutOfResources : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The driver's handles: pointers to what only it knows.
struct DriverFunction;
struct DriverModule;
struct DriverStream;
using Function = DriverFunction*;
using Module = DriverModule*;
using Stream = DriverStream*;
struct DriverGraph;
struct DriverGraphExec;
struct DriverGraphNode;
struct DriverEvent;
using Graph = DriverGraph*;
using GraphExec = DriverGraphExec*;
using GraphNode = DriverGraphNode*;
using Event = DriverEvent*;

// As in the driver's interface (cuda.h, CUlaunchAttribute and CUlaunchConfig); a test compares.
struct Attribute {
  enum Id : int { cooperative = 2, cluster_dimension = 4, cluster_policy = 5, serialization = 6 };
  Id id;
  int pad = 0;
  std::array<uint32_t, 16> value{};
};

struct Config {
  uint32_t grid_x, grid_y, grid_z;
  uint32_t block_x, block_y, block_z;
  uint32_t shared;
  Stream stream;
  Attribute* attributes;
  uint32_t n_attributes;
};

// As CUDA_KERNEL_NODE_PARAMS_v2.
struct NodeParams {
  Function function;
  uint32_t grid_x, grid_y, grid_z;
  uint32_t block_x, block_y, block_z;
  uint32_t shared;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};

// As CUDA_MEMCPY3D_v2.
struct CopyParams {
  struct Side {
    size_t x, y, z, lod;
    int memory_type;
    void* host;
    void* device;
    void *array, *reserved;
    size_t pitch, height;
  };
  Side from, to;
  size_t nbytes, height, depth;
};

// As CUDA_MEMSET_NODE_PARAMS.
struct FillParams {
  void* to;
  size_t pitch;
  uint32_t value, element_nbytes;
  size_t width, height;
};

// As CUgraphNodeParams of a conditional node. condition: what cuGraphConditionalHandleCreate gave.
// bodies: where the driver says which graphs they are.
struct ConditionalParams {
  enum Kind : int { once = 0, again = 1 };
  int type = 13;  // CU_GRAPH_NODE_TYPE_CONDITIONAL
  int unused[3]{};
  uint64_t condition = 0;
  Kind kind = once;
  uint32_t n_bodies = 1;
  Graph* bodies = nullptr;
  void* context = nullptr;
  std::array<uint64_t, 26> rest{};
};

// The entry points of one driver library.
class Driver {
 public:
  // The machine's own driver, opened once. Throws DriverError where there is none.
  static const Driver& machine();
  explicit Driver(const char* library);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  void check(int code, std::string_view what) const {
    if (code != 0) [[unlikely]]
      fail(code, what);
  }
  [[noreturn]] void fail(int code, std::string_view what) const;

  // A thread that has not met CUDA yet gets the context that the runtime uses on this device.
  void need_context(int device) const {
    void* context = nullptr;
    if (current_context(&context) == 0 && context) [[likely]]
      return;
    check(retain_context(&context, device), "cuDevicePrimaryCtxRetain");
    check(set_context(context), "cuCtxSetCurrent");
  }

  void* context() const {  // the current one
    void* found = nullptr;
    check(current_context(&found), "cuCtxGetCurrent");
    return found;
  }

  // The entry point of a name; null if the driver has none.
  template <class F>
  void find(F& entry, const char* name) const {
    entry = reinterpret_cast<F>(symbol(name));
  }
  // One that must be there: throws DriverError if the driver has none.
  template <class F>
  void need(F& entry, const char* name) const {
    find(entry, name);
    if (!entry) lacks(name);
  }

  int (*init)(unsigned);
  int (*error_string)(int, const char**);
  int (*current_device)(int*);
  int (*current_context)(void**);
  int (*retain_context)(void**, int);
  int (*set_context)(void*);
  int (*device_attribute)(int*, int, int);
  int (*lanes_of_warp)(int*);                             // of the current device
  int (*architecture)(const Driver&, std::string*, int);  // of a device: "sm_90", "gfx942"
  int (*load_module)(Module*, const void*);
  int (*unload_module)(Module);
  int (*function)(Function*, Module, const char*);
  int (*function_attribute)(int*, int, Function);
  int (*set_function_attribute)(Function, int, int);
  int (*launch)(const Config*, Function, void**, void**);
  int (*parameter)(Function, size_t, size_t*, size_t*);  // null in drivers before 12.4
  int (*is_capturing)(Stream, int*);
  int (*capture_info)(Stream, int*, uint64_t*, Graph*, const GraphNode**, size_t*);
  int (*set_node)(GraphExec, GraphNode, const NodeParams*);
  int (*copy_node)(GraphNode, CopyParams*);
  int (*set_copy_node)(GraphExec, GraphNode, const CopyParams*, void* context);
  // Of results that move, see moved_results.h: null in HIP and in drivers before 12.4.
  int (*node_type)(GraphNode, int*) = nullptr;
  int (*kernel_node)(GraphNode, NodeParams*) = nullptr;
  int (*nodes_before)(GraphNode, GraphNode*, void* edges, size_t*) = nullptr;
  int (*parameter_of_kernel)(void*, size_t, size_t*, size_t*) = nullptr;
  int (*destroy_node)(GraphNode) = nullptr;
  int (*pointer_attribute)(void*, int, uint64_t address) = nullptr;
  int (*fill_node)(GraphNode, FillParams*) = nullptr;
  int (*set_fill_node)(GraphExec, GraphNode, const FillParams*, void* context) = nullptr;
  bool moves_results() const {
    return node_type && kernel_node && nodes_before && parameter && parameter_of_kernel &&
           destroy_node && pointer_attribute && fill_node && set_fill_node && after;
  }
  int (*launch_graph)(GraphExec, Stream);
  int (*copy)(void*, const void*, size_t, Stream);
  int (*make_event)(Event*, unsigned);
  int (*record_event)(Event, Stream);
  int (*wait_event)(Stream, Event, unsigned);
  int (*synchronize)();
  // Of conditional nodes: null in HIP and in drivers before 12.4. after: what comes next on a
  // stream that is recorded follows these nodes. record_to: what is put on a stream goes to a
  // graph.
  int (*make_condition)(uint64_t*, Graph, void* context, unsigned first, unsigned flags) = nullptr;
  int (*add_node)(GraphNode*, Graph, const GraphNode*, const void* edges, size_t,
                  ConditionalParams*) = nullptr;
  int (*after)(Stream, const GraphNode*, size_t, unsigned flags) = nullptr;
  int (*record_to)(Stream, Graph, const GraphNode*, const void* edges, size_t, int) = nullptr;
  int (*end_recording)(Stream, Graph*) = nullptr;
  bool has_conditional_nodes() const { return make_condition && add_node && record_to; }
  // Whether graphs can hold a kernel that starts before the one ahead of it has ended: since 12.3.
  bool records_early;
  int (*allocate)(void**, size_t, Stream);  // these two are null in drivers before 11.2
  int (*free)(void*, Stream);

 private:
  void* symbol(const char* name) const;
  [[noreturn]] void lacks(const char* name) const;
  void* library_;
};

// A maker of GPUs.
struct Maker {
  std::vector<const char*> libraries;  // names of its driver's library
  const char* mark;                    // an entry point that no other maker's library has
  void (*find_entries)(Driver&);       // fills every field of a driver
  std::vector<const char*> gpus;       // how names of its GPUs begin: "gfx"
  bool (*runs)(const std::string& made_for, const std::string& gpu);  // on a GPU of another name
};
extern const Maker kAmd, kNvidia;
// The driver of the first whose library is loaded already (by torch for ROCm, say) is the
// machine's, else that of the last whose library can be opened.
inline constexpr const Maker* kMakers[] = {&kAmd, &kNvidia};

// What the compiler's metadata says of a kernel. Scratch: bytes a program
// and alignment.
struct KernelFacts {
  std::string symbol;
  uint32_t num_warps = 4, num_ctas = 1, shared = 0;
  int64_t global_scratch = 0, global_alignment = 1, profile_scratch = 0, profile_alignment = 1;
  bool cooperative = false, pdl = false;
};

// A grid as one word, which plait/ir/calls.py packs: programs along x; or, with bit 62 set,
// programs along x in bits 0 to 30, along y in 31 to 46, along z in 47 to 61.
struct Grid {
  explicit Grid(uint64_t word) : x(word) {
    if (!(word >> 62 & 1)) return;
    x = word & 0x7fffffff;
    y = word >> 31 & 0xffff;
    z = word >> 47 & 0x7fff;
  }
  uint64_t programs() const { return x * y * z; }
  uint64_t x, y = 1, z = 1;
};

// One kernel in one context. Threads may launch it at once.
class Kernel {
 public:
  // n_arguments: of the signature; the pointers to scratch memory that follow are counted here.
  // Throws DriverError, and std::runtime_error if the image does not fit the facts.
  Kernel(const Driver& driver, const void* image, const KernelFacts& facts, size_t n_arguments);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Enqueues a launch. grid: see Grid. parameters: one address an argument, then those of the two
  // scratch pointers. An empty grid is no launch.
  void launch(Stream stream, uint64_t grid, void** parameters) const {
    if (grid == 0) return;
    Config config = config_of(grid);
    config.stream = stream;
    launch(config, parameters);
  }
  void launch(const Config& config, void** parameters) const {
    driver_.check(driver_.launch(&config, function_, parameters, nullptr), symbol_);
  }

  // What `launch` takes for a grid that is not empty, but for the stream.
  Config config_of(uint64_t word) const {
    const Grid grid(word);
    return config_of(grid.x, grid.y, grid.z);
  }
  Config config_of(uint64_t x, uint64_t y, uint64_t z) const {
    if (x > max_grid_ || y > kMaxGridYZ || z > kMaxGridYZ) [[unlikely]]
      too_large(x, y, z);
    Config config = config_;
    config.grid_x = static_cast<uint32_t>(x) * num_ctas_;
    config.grid_y = static_cast<uint32_t>(y);
    config.grid_z = static_cast<uint32_t>(z);
    return config;
  }

  // A launch as a graph's node has it.
  NodeParams node_of(const Config& config, void** parameters) const;
  // The parameters of one launch inside a recorded graph, from its next launch on.
  void set_node(GraphExec graph, GraphNode node, uint64_t grid, void** parameters) const;

  size_t n_parameters() const { return n_parameters_; }
  size_t parameter_nbytes(size_t index) const;  // 0: the driver is too old to say
  const std::string& symbol() const { return symbol_; }
  const KernelFacts& facts() const { return facts_; }

 private:
  void prepare_shared(uint32_t bytes);
  void prepare_attributes();
  void check_parameters() const;
  [[noreturn]] void too_large(uint64_t x, uint64_t y, uint64_t z) const;

  static constexpr uint64_t kMaxGridYZ = 65535;

  const Driver& driver_;
  KernelFacts facts_;
  std::string symbol_;
  Module module_ = nullptr;
  Function function_ = nullptr;
  std::vector<Attribute> attributes_;
  Config config_{};
  uint32_t num_ctas_;
  uint64_t max_grid_;
  size_t n_parameters_;
};

}  // namespace plait::cuda
