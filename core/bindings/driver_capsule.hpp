#pragma once
// How an extension module that has a driver hands it to telegrad._core: a capsule of this name, which holds a
// std::unique_ptr<AddressedDriver>. Both modules are built together, so they agree on what that is.

namespace telegrad::bindings {

inline constexpr const char* kDriverCapsule = "telegrad driver";

}  // namespace telegrad::bindings
