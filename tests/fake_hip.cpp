// tests/fake_hip.cpp: AMD's driver without a GPU. It checks what it is told, by AMD's own header
// and by what a code object says of its kernels, and launches nothing.
//
// The device is the one that $FAKE_HIP_ARCH names, such as gfx942. A launch that does not fit its
// kernel is an error, whose text is the reason; one that does goes to the function that
// fake_hip_on_launch was given, with the bytes of its arguments, a word each. Where there is none,
// it is written to $FAKE_HIP_LOG.
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {
struct Value {  // of MessagePack
  uint64_t number = 0;
  std::string text;
  std::vector<Value> items;
  std::map<std::string, Value> fields;
  const Value& operator[](const char* name) const { return fields.at(name); }
};

struct Reader {
  const unsigned char* at;
  uint64_t word(int nbytes) {
    uint64_t n = 0;
    for (int k = 0; k < nbytes; ++k) n = n << 8 | *at++;
    return n;
  }
  Value text(uint64_t n) {
    Value v;
    v.text.assign(reinterpret_cast<const char*>(at), n);
    at += n;
    return v;
  }
  Value list(uint64_t n) {
    Value v;
    for (; n; --n) v.items.push_back(read());
    return v;
  }
  Value map(uint64_t n) {
    Value v;
    for (; n; --n) {
      std::string name = read().text;
      v.fields[name] = read();
    }
    return v;
  }
  Value read() {
    const unsigned head = *at++;
    if (head < 0x80) return {head, {}, {}, {}};
    if (head < 0x90) return map(head & 15);
    if (head < 0xa0) return list(head & 15);
    if (head < 0xc0) return text(head & 31);
    switch (head) {
      case 0xc2:
      case 0xc3: return {head & 1, {}, {}, {}};
      case 0xcc: return {word(1), {}, {}, {}};
      case 0xcd: return {word(2), {}, {}, {}};
      case 0xce: return {word(4), {}, {}, {}};
      case 0xcf: return {word(8), {}, {}, {}};
      case 0xd9: return text(word(1));
      case 0xda: return text(word(2));
      case 0xdc: return list(word(2));
      case 0xde: return map(word(2));
      default: throw std::runtime_error("unknown MessagePack");
    }
  }
};

template <class T>
T field(const char* data, size_t offset) {
  T value;
  std::memcpy(&value, data + offset, sizeof value);
  return value;
}

// The metadata of a code object: the note of AMDGPU's, of type 32.
Value metadata_of(const char* elf) {
  if (std::memcmp(elf, "\177ELF", 4) != 0) throw std::runtime_error("no ELF file");
  const auto headers = field<uint64_t>(elf, 32);
  for (size_t k = 0; k < field<uint16_t>(elf, 56); ++k) {
    const char* header = elf + headers + k * field<uint16_t>(elf, 54);
    if (field<uint32_t>(header, 0) != 4) continue;
    const char* note = elf + field<uint64_t>(header, 8);
    if (field<uint32_t>(note, 8) != 32) continue;
    return Reader{reinterpret_cast<const unsigned char*>(note) + 20}.read();
  }
  throw std::runtime_error("no metadata");
}

const char* architecture() {
  const char* name = std::getenv("FAKE_HIP_ARCH");
  return name ? name : "gfx942";
}
int lanes() { return architecture()[3] == '9' ? 64 : 32; }

std::string reason;
hipError_t refuse(const std::string& why) {
  reason = why;
  return hipErrorInvalidValue;
}

struct Module {
  Value metadata;
};
struct Function {
  const Value* kernel;
  std::vector<std::pair<uint64_t, std::string>> arguments;  // bytes and kind; none that are hidden
};

using OnLaunch = void (*)(const char* symbol, const uint32_t* grid, const uint64_t* words,
                          size_t n);
OnLaunch on_launch = nullptr;

void note(const std::string& line) {
  if (!std::getenv("FAKE_HIP_LOG")) return;
  FILE* out = std::fopen(std::getenv("FAKE_HIP_LOG"), "a");
  std::fprintf(out, "%s\n", line.c_str());
  std::fclose(out);
}

const Function& of(const void* function) { return *static_cast<const Function*>(function); }

hipError_t check(const Function& f, dim3 grid, dim3 block, unsigned shared, void** parameters,
                 void** extra) {
  const Value& k = *f.kernel;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (!parameters || extra) return refuse("arguments are to be addresses");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return refuse("an empty grid");
  if (threads != k[".max_flat_workgroup_size"].number)
    return refuse("a block of " + std::to_string(threads) + " threads, it was compiled for " +
                  std::to_string(k[".max_flat_workgroup_size"].number));
  if (static_cast<int>(k[".wavefront_size"].number) != lanes()) return refuse("other warps");
  if (shared + k[".group_segment_fixed_size"].number > 65536) return refuse("too much memory");
  for (size_t n = 0; n < f.arguments.size(); ++n) {
    if (!parameters[n]) return refuse("argument " + std::to_string(n) + " has no address");
    if (f.arguments[n].first > 8) return refuse("an argument of more than a word");
  }
  return hipSuccess;
}

hipError_t launch(const Function& f, dim3 grid, dim3 block, unsigned shared, void* stream,
                  void** parameters, void** extra, const char* how) {
  const hipError_t error = check(f, grid, block, shared, parameters, extra);
  if (error != hipSuccess) return error;
  std::vector<uint64_t> words(f.arguments.size());
  std::string line = how + (" " + (*f.kernel)[".name"].text);
  for (unsigned n : {grid.x, grid.y, grid.z, block.x, block.y, block.z, shared})
    line += " " + std::to_string(n);
  line += " stream " + std::to_string(reinterpret_cast<size_t>(stream)) + ":";
  for (size_t n = 0; n < words.size(); ++n) {
    std::memcpy(&words[n], parameters[n], f.arguments[n].first);
    line += " " + f.arguments[n].second + " " + std::to_string(words[n]);
  }
  if (on_launch)
    on_launch((*f.kernel)[".name"].text.c_str(), &grid.x, words.data(), words.size());
  else
    note(line);
  return hipSuccess;
}
thread_local int current = 0;
}  // namespace

extern "C" {
void fake_hip_on_launch(OnLaunch f) { on_launch = f; }

hipError_t hipInit(unsigned) { return hipSuccess; }
hipError_t hipDrvGetErrorString(hipError_t, const char** text) {
  *text = reason.c_str();
  return hipSuccess;
}
hipError_t hipGetDevice(int* device) {
  *device = current;
  return hipSuccess;
}
hipError_t hipSetDevice(int device) {
  current = device;
  return hipSuccess;
}
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  switch (attribute) {
    case hipDeviceAttributeWarpSize: *value = lanes(); return hipSuccess;
    case hipDeviceAttributeMultiprocessorCount: *value = 304; return hipSuccess;
    case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = 65536; return hipSuccess;
    default: return refuse("attribute " + std::to_string(attribute));
  }
}
hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int) {
  std::memset(properties, 'x', sizeof *properties);
  std::snprintf(properties->gcnArchName, sizeof properties->gcnArchName, "%s:sramecc+:xnack-",
                architecture());
  return hipSuccess;
}
hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  try {
    auto made = std::make_unique<Module>();
    made->metadata = metadata_of(static_cast<const char*>(image));
    const std::string target = made->metadata["amdhsa.target"].text;
    if (target.substr(target.rfind('-') + 1) != architecture())
      return refuse("it is for " + target);
    *module = reinterpret_cast<hipModule_t>(made.release());
    return hipSuccess;
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}
hipError_t hipModuleUnload(hipModule_t module) {
  note("unload");
  delete reinterpret_cast<Module*>(module);
  return hipSuccess;
}
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  for (const Value& k : reinterpret_cast<Module*>(module)->metadata["amdhsa.kernels"].items) {
    if (k[".name"].text != name) continue;
    auto* made = new Function{&k, {}};
    for (const Value& a : k[".args"].items)
      if (!a[".value_kind"].text.starts_with("hidden_"))
        made->arguments.emplace_back(a[".size"].number, a[".value_kind"].text);
    *function = reinterpret_cast<hipFunction_t>(made);
    return hipSuccess;
  }
  return refuse(std::string("no kernel ") + name);
}
hipError_t hipFuncGetAttribute(int* value, hipFunction_attribute which, hipFunction_t function) {
  if (which != HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) return refuse("an attribute of functions");
  *value = static_cast<int>((*of(function).kernel)[".group_segment_fixed_size"].number);
  return hipSuccess;
}
hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned gx, unsigned gy, unsigned gz,
                                 unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                 hipStream_t stream, void** parameters, void** extra) {
  return launch(of(f), {gx, gy, gz}, {bx, by, bz}, shared, stream, parameters, extra, "launch");
}
hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t f, unsigned gx, unsigned gy, unsigned gz,
                                            unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                            hipStream_t stream, void** parameters) {
  return launch(of(f), {gx, gy, gz}, {bx, by, bz}, shared, stream, parameters, nullptr,
                "launch together");
}
hipError_t hipGraphExecKernelNodeSetParams(hipGraphExec_t, hipGraphNode_t node,
                                           const hipKernelNodeParams* p) {
  return launch(of(p->func), p->gridDim, p->blockDim, p->sharedMemBytes, node, p->kernelParams,
                p->extra, "node");
}
hipError_t hipStreamIsCapturing(hipStream_t, hipStreamCaptureStatus* status) {
  *status = hipStreamCaptureStatusNone;
  return hipSuccess;
}
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t, hipStreamCaptureStatus*, unsigned long long*,
                                      hipGraph_t*, const hipGraphNode_t**, size_t*) {
  return refuse("nothing is captured");
}
hipError_t hipGraphLaunch(hipGraphExec_t, hipStream_t) { return refuse("there is no graph"); }
hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t to, hipDeviceptr_t from, size_t n, hipStream_t) {
  std::memcpy(to, from, n);
  return hipSuccess;
}
hipError_t hipEventCreateWithFlags(hipEvent_t*, unsigned) { return hipSuccess; }
hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipSuccess; }
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned) { return hipSuccess; }
hipError_t hipDeviceSynchronize() { return hipSuccess; }
hipError_t hipMallocAsync(void** memory, size_t n, hipStream_t) {
  *memory = std::aligned_alloc(256, (n + 255) / 256 * 256);
  return hipSuccess;
}
hipError_t hipFreeAsync(void* memory, hipStream_t) {
  std::free(memory);
  return hipSuccess;
}
}
