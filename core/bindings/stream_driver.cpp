#include "bindings/stream_driver.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace telegrad::bindings {
namespace {

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr unsigned kFenced = 0;          // CU_STREAM_WRITE_VALUE_DEFAULT: a memory barrier before the write
constexpr unsigned kGreaterOrEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ: by the sign of the difference
constexpr unsigned kPlain = 0;           // CU_EVENT_WAIT_DEFAULT
constexpr int kNotCapturing = 0;         // CU_STREAM_CAPTURE_STATUS_NONE

void* as_handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

}  // namespace

// A stream may be the default one, a number that means another stream in each device's context.
class StreamDriver::Entered {
 public:
  explicit Entered(const StreamDriver& driver) : driver_(driver) {
    driver.check("cuCtxPushCurrent", driver.push_(driver.context_));
  }
  ~Entered() {
    Handle popped = nullptr;
    driver_.pop_(&popped);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  const StreamDriver& driver_;
};

StreamDriver::StreamDriver(const std::string& library, std::uintptr_t context) : context_(as_handle(context)) {
  void* const opened = dlopen(library.c_str(), RTLD_NOW);  // never closed: CUDA does not end before the process does
  if (opened == nullptr) throw std::runtime_error(dlerror());
  const auto find = [&](auto& function, const char* name) {
    void* const found = dlsym(opened, name);
    if (found == nullptr) throw std::runtime_error(library + " has no " + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  find(push_, "cuCtxPushCurrent_v2");
  find(pop_, "cuCtxPopCurrent_v2");
  find(copy_to_host_, "cuMemcpyDtoHAsync_v2");
  find(copy_to_device_, "cuMemcpyHtoDAsync_v2");
  find(write_, "cuStreamWriteValue32_v2");
  find(wait_, "cuStreamWaitValue32_v2");
  find(record_, "cuEventRecord");
  find(wait_for_, "cuStreamWaitEvent");
  find(query_, "cuEventQuery");
  find(capturing_, "cuStreamIsCapturing");
  find(name_, "cuGetErrorName");
}

void StreamDriver::stage(std::uintptr_t stream, std::uintptr_t host, std::uintptr_t device, std::size_t bytes,
                         std::uintptr_t ready, std::uint32_t value) const {
  const Entered entered(*this);
  check("cuMemcpyDtoHAsync", copy_to_host_(as_handle(host), device, bytes, as_handle(stream)));
  check("cuStreamWriteValue32", write_(as_handle(stream), ready, value, kFenced));
}

void StreamDriver::fetch(std::uintptr_t stream, std::uintptr_t done, std::uint32_t value, std::uintptr_t device,
                         std::uintptr_t host, std::size_t bytes, std::uintptr_t event) const {
  const Entered entered(*this);
  check("cuStreamWaitValue32", wait_(as_handle(stream), done, value, kGreaterOrEqual));
  check("cuMemcpyHtoDAsync", copy_to_device_(device, as_handle(host), bytes, as_handle(stream)));
  check("cuEventRecord", record_(as_handle(event), as_handle(stream)));
}

void StreamDriver::join(std::uintptr_t first, std::uintptr_t second, std::uintptr_t event) const {
  const Entered entered(*this);
  check("cuEventRecord", record_(as_handle(event), as_handle(first)));
  check("cuStreamWaitEvent", wait_for_(as_handle(second), as_handle(event), kPlain));
}

bool StreamDriver::passed(std::uintptr_t event) const {
  const Entered entered(*this);
  const Status status = query_(as_handle(event));
  if (status == kNotReady) return false;
  check("cuEventQuery", status);
  return true;
}

bool StreamDriver::is_capturing(std::uintptr_t stream) const {
  const Entered entered(*this);
  int capturing = kNotCapturing;
  check("cuStreamIsCapturing", capturing_(as_handle(stream), &capturing));
  return capturing != kNotCapturing;
}

void StreamDriver::check(const char* function, Status status) const {
  if (status == kSuccess) return;
  const char* name = nullptr;
  if (name_(status, &name) != kSuccess || name == nullptr) name = "an error that the driver does not know";
  throw std::runtime_error(std::string(function) + " failed with " + name);
}

}  // namespace telegrad::bindings
