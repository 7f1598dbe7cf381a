#include "bindings/torch_tensor.hpp"

#include <array>
#include <utility>

#include "bindings/names.hpp"
#include "bindings/python_type.hpp"

namespace telegrad::bindings {
namespace {

// Objects of torch, and names of what is asked of tensors; never given back.
class Torch {
 public:
  /// Null while the program has not imported torch.
  static const Torch* imported() {
    static const Torch* torch = nullptr;
    if (torch != nullptr) return torch;
    static PyObject* const name = interned("torch");
    const nb::handle module = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
    // Another thread may be in the middle of importing it.
    if (!module.is_valid() || !nb::hasattr(module, "nn") || !nb::hasattr(module.attr("nn"), "Parameter")) return nullptr;
    torch = new Torch(module);
    return torch;
  }

  bool is_tensor(nb::handle x) const { return x.type().is(tensor_) || x.type().is(parameter_); }

  std::optional<HostBuffer> host_buffer_of(nb::handle x) const {
    return is_true(get(x, is_cpu_)) ? buffer_of(x) : std::nullopt;
  }

  std::optional<HostBuffer> buffer_on(nb::handle device, nb::handle x) const {
    const int is_there = PyObject_RichCompareBool(get(x, device_).ptr(), device.ptr(), Py_EQ);
    if (is_there < 0) throw nb::python_error();
    return is_there == 1 && !is_true(call(x, is_inference_)) ? buffer_of(x) : std::nullopt;
  }

 private:
  std::optional<HostBuffer> buffer_of(nb::handle x) const {
    const nb::object dtype = get(x, dtype_);
    for (const auto& [torchs, ours] : dtypes_) {
      if (!dtype.is(torchs)) continue;
      // Only complex numbers can be lazily conjugate; but their imaginary parts, lazily negative.
      if (!get(x, layout_).is(strided_) || !is_true(call(x, is_contiguous_)) || is_true(call(x, is_neg_))) {
        return std::nullopt;
      }
      const auto elements = nb::cast<std::size_t>(call(x, numel_));
      const auto pointer = nb::cast<std::uintptr_t>(call(x, data_ptr_));
      if (pointer == 0 && elements != 0) return std::nullopt;  // its storage was freed
      return HostBuffer{pointer, elements, elements * size_of(ours), ours};
    }
    return std::nullopt;
  }

  explicit Torch(nb::handle module)
      : tensor_(kept(module, "Tensor")),
        parameter_(kept(module.attr("nn"), "Parameter")),
        strided_(kept(module, "strided")),
        dtypes_{{{kept(module, "float32"), DType::f32},
                 {kept(module, "float64"), DType::f64},
                 {kept(module, "float16"), DType::f16},
                 {kept(module, "bfloat16"), DType::bf16},
                 {kept(module, "int32"), DType::i32},
                 {kept(module, "int64"), DType::i64}}} {}

  static nb::handle kept(nb::handle owner, const char* name) { return nb::object(owner.attr(name)).release(); }
  static nb::object checked(PyObject* result) {
    if (result == nullptr) throw nb::python_error();
    return nb::steal(result);
  }
  static nb::object get(nb::handle x, PyObject* name) { return checked(PyObject_GetAttr(x.ptr(), name)); }
  static nb::object call(nb::handle x, PyObject* name) { return checked(call_method(x.ptr(), name)); }
  static bool is_true(const nb::object& answer) { return answer.ptr() == Py_True; }

  nb::handle tensor_;
  nb::handle parameter_;
  nb::handle strided_;
  std::array<std::pair<nb::handle, DType>, 6> dtypes_;
  PyObject* dtype_ = interned("dtype");
  PyObject* layout_ = interned("layout");
  PyObject* device_ = interned("device");
  PyObject* is_cpu_ = interned("is_cpu");
  PyObject* is_inference_ = interned("is_inference");
  PyObject* is_contiguous_ = interned("is_contiguous");
  PyObject* is_neg_ = interned("is_neg");
  PyObject* numel_ = interned("numel");
  PyObject* data_ptr_ = interned("data_ptr");
};

}  // namespace

std::optional<HostBuffer> torch_buffer_of(nb::handle x) {
  const Torch* const torch = Torch::imported();
  if (torch == nullptr || !torch->is_tensor(x)) return std::nullopt;
  return torch->host_buffer_of(x);
}

std::optional<HostBuffer> torch_buffer_on(nb::handle device, nb::handle x) {
  const Torch* const torch = Torch::imported();
  if (torch == nullptr || !torch->is_tensor(x)) return std::nullopt;
  return torch->buffer_on(device, x);
}

}  // namespace telegrad::bindings
