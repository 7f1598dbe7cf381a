#include "simulation/measure.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <map>
#include <string>
#include <utility>

#include "bindings/binding.hpp"
#include "bindings/unlocked.hpp"

namespace telegrad::bindings {
namespace {

template <class T>
using NumpyVector = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// A numpy array that owns `values`.
template <class T>
NumpyVector<T> as_array(std::vector<T> values) {
  auto* const owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return NumpyVector<T>(owned->data(), {owned->size()}, owner);
}

// One field of every row, as an array of Ts.
template <class T, class Row, class Field>
NumpyVector<T> column(const std::vector<Row>& rows, Field Row::*field) {
  std::vector<T> values;
  values.reserve(rows.size());
  for (const Row& row : rows) values.push_back(static_cast<T>(row.*field));
  return as_array(std::move(values));
}

nb::dict as_dict(const std::vector<SimLinkCounts>& links) {
  nb::dict result;
  result["from"] = column<std::uint32_t>(links, &SimLinkCounts::from);
  result["to"] = column<std::uint32_t>(links, &SimLinkCounts::to);
  result["messages"] = column<std::uint64_t>(links, &SimLinkCounts::messages);
  result["bytes"] = column<std::uint64_t>(links, &SimLinkCounts::bytes);
  return result;
}

nb::dict as_dict(const std::vector<SimActivity>& timeline) {
  nb::dict result;
  result["kind"] = column<std::uint8_t>(timeline, &SimActivity::kind);
  result["rank"] = column<std::uint32_t>(timeline, &SimActivity::rank);
  result["peer"] = column<std::uint32_t>(timeline, &SimActivity::peer);
  result["operation"] = column<std::uint32_t>(timeline, &SimActivity::sequence);
  result["step"] = column<std::uint32_t>(timeline, &SimActivity::step);
  result["bytes"] = column<std::uint64_t>(timeline, &SimActivity::bytes);
  result["start_s"] = column<double>(timeline, &SimActivity::start_s);
  result["end_s"] = column<double>(timeline, &SimActivity::end_s);
  return result;
}

nb::dict as_dict(const Workload& workload, Measurement found) {
  nb::dict result;
  result["finish_s"] = found.finish_s;
  result["finish_by_rank_s"] = as_array(std::move(found.finish_by_rank_s));
  result["messages_sent"] = as_array(std::move(found.messages_sent));
  result["messages_received"] = as_array(std::move(found.messages_received));
  result["bytes_sent"] = as_array(std::move(found.bytes_sent));
  result["bytes_received"] = as_array(std::move(found.bytes_received));
  result["events"] = found.events;
  result["result_nnz"] = found.result_nnz;
  result["words_sent"] = as_array(std::move(found.words_sent));
  result["words_received"] = as_array(std::move(found.words_received));
  if (workload.links) result["links"] = as_dict(found.links);
  if (workload.timeline) result["timeline"] = as_dict(found.timeline);
  return result;
}

nb::dict measure_workload(const std::string& operation, const std::string& algorithm, Rank ranks, std::uint64_t bytes,
                          std::uint64_t nnz, double overlap, double switch_factor, IndexFormat indices,
                          ValueEncoding values, Rank root, bool payloads, std::uint64_t seed, std::uint32_t calls,
                          const std::map<std::string, double>& costs, bool links, bool timeline, bool packs_values,
                          std::uint64_t keep) {
  Workload workload{.operation = operation_named(operation),
                    .algorithm = algorithm_named(algorithm),
                    .ranks = ranks,
                    .bytes = bytes,
                    .nnz = nnz,
                    .overlap = overlap,
                    .keep = keep,
                    .switch_factor = switch_factor,
                    .wire = {.indices = indices, .values = values, .key = {.seed = seed}, .packs_values = packs_values},
                    .root = root,
                    .payloads = payloads,
                    .seed = seed,
                    .calls = calls,
                    .links = links,
                    .timeline = timeline};
  for (const auto& [name, value] : costs) set_cost(workload.costs, name, value);
  Measurement found;
  {
    const Unlocked unlocked;
    found = measure(workload);
  }
  return as_dict(workload, std::move(found));
}

}  // namespace

void bind_measure(nb::module_& module) {
  module.def("measure", &measure_workload, nb::arg("operation"), nb::arg("algorithm"), nb::arg("ranks"),
             nb::arg("bytes"), nb::arg("nnz") = 0, nb::arg("overlap") = 0.0, nb::arg("switch_factor") = 1.0,
             nb::arg("indices") = IndexFormat::none, nb::arg("values") = ValueEncoding::native, nb::arg("root") = 0,
             nb::arg("payloads") = false, nb::arg("seed") = 0, nb::arg("calls") = 1, nb::arg("costs") = nb::dict(),
             nb::arg("links") = false, nb::arg("timeline") = false, nb::arg("packs_values") = false,
             nb::arg("keep") = 0);
}

}  // namespace telegrad::bindings
