#pragma once
// How C++ errors become those of telegrad.errors, in each extension module.

namespace telegrad::bindings {

/// From now on a TransportError that leaves this module is raised as the Python error of its kind.
void translate_transport_errors();

}  // namespace telegrad::bindings
