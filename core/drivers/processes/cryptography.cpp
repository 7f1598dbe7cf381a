#include "drivers/processes/cryptography.hpp"

#include <dlfcn.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "base/check.hpp"

namespace telegrad {
namespace {

// As OpenSSL's evp.h has them, unchanged since 1.0.2.
constexpr int kSetIvLength = 0x9;  // EVP_CTRL_GCM_SET_IVLEN
constexpr int kGetTag = 0x10;      // EVP_CTRL_GCM_GET_TAG
constexpr std::size_t kIvBytes = 12;
constexpr std::size_t kPieceMost = std::size_t{1} << 30;  // of what one call takes: an int

struct Functions {
  unsigned char* (*hmac)(const void* digest, const void* key, int key_length, const unsigned char* data, std::size_t length,
                         unsigned char* out, unsigned* out_length) = nullptr;
  const void* (*sha256)() = nullptr;
  int (*compare)(const void* a, const void* b, std::size_t length) = nullptr;
  void* (*new_context)() = nullptr;
  void (*free_context)(void*) = nullptr;
  const void* (*aes_256_gcm)() = nullptr;
  int (*begin)(void* context, const void* cipher, void* engine, const unsigned char* key, const unsigned char* iv) = nullptr;
  int (*update)(void* context, unsigned char* out, int* out_length, const unsigned char* in, int length) = nullptr;
  int (*end)(void* context, unsigned char* out, int* out_length) = nullptr;
  int (*control)(void* context, int type, int argument, void* pointer) = nullptr;
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

bool open(Functions& found) {
  for (const char* const name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);  // never closed
    if (library != nullptr && find(library, "HMAC", found.hmac) && find(library, "EVP_sha256", found.sha256) &&
        find(library, "CRYPTO_memcmp", found.compare) && find(library, "EVP_CIPHER_CTX_new", found.new_context) &&
        find(library, "EVP_CIPHER_CTX_free", found.free_context) && find(library, "EVP_aes_256_gcm", found.aes_256_gcm) &&
        find(library, "EVP_EncryptInit_ex", found.begin) && find(library, "EVP_EncryptUpdate", found.update) &&
        find(library, "EVP_EncryptFinal_ex", found.end) && find(library, "EVP_CIPHER_CTX_ctrl", found.control)) {
      return true;
    }
  }
  return false;
}

const Functions* functions() {
  static Functions found;
  static const bool has_all = open(found);
  return has_all ? &found : nullptr;
}

const unsigned char* raw(ConstBytes bytes) { return reinterpret_cast<const unsigned char*>(bytes.data()); }

void check(bool succeeded, const char* what) {
  if (!succeeded) throw std::runtime_error(std::string("OpenSSL's ") + what + " failed: is AES or SHA-256 switched off there?");
}

}  // namespace

void require_cryptography(const char* wanted_by) {
  if (functions() != nullptr) return;
  throw std::invalid_argument(std::string(wanted_by) +
                              " needs OpenSSL's libcrypto.so.3 or libcrypto.so.1.1, and this system has neither: install it "
                              "(apt install openssl, dnf install openssl-libs)");
}

Digest hmac_sha256(ConstBytes key, std::initializer_list<ConstBytes> parts) {
  std::vector<std::byte> all;
  for (const ConstBytes part : parts) all.insert(all.end(), part.begin(), part.end());
  const Functions& use = *functions();
  Digest digest;
  unsigned length = 0;
  check(use.hmac(use.sha256(), key.data(), static_cast<int>(key.size()), raw(all), all.size(),
                 reinterpret_cast<unsigned char*>(digest.data()), &length) != nullptr &&
            length == digest.size(),
        "HMAC");
  return digest;
}

bool same_bytes(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && functions()->compare(a.data(), b.data(), a.size()) == 0;
}

Digest random_digest() {
  Digest digest;
  if (::getrandom(digest.data(), digest.size(), 0) != static_cast<ssize_t>(digest.size())) {
    throw std::runtime_error("the kernel gives no random numbers (getrandom)");
  }
  return digest;
}

Mac::Mac(const Digest& key) : context_(functions()->new_context(), functions()->free_context) {
  const Functions& use = *functions();
  check(context_ != nullptr && use.begin(context_.get(), use.aes_256_gcm(), nullptr, nullptr, nullptr) == 1 &&
            use.control(context_.get(), kSetIvLength, kIvBytes, nullptr) == 1 &&
            use.begin(context_.get(), nullptr, nullptr, raw(key), nullptr) == 1,
        "AES-256-GCM");
}

Tag Mac::tag(std::uint64_t number, ConstBytes first, ConstBytes second) {
  const Functions& use = *functions();
  std::array<unsigned char, kIvBytes> iv{};
  std::memcpy(iv.data(), &number, sizeof number);
  bool works = use.begin(context_.get(), nullptr, nullptr, nullptr, iv.data()) == 1;
  int unused = 0;
  for (ConstBytes part : {first, second}) {
    while (works && !part.empty()) {
      const std::size_t length = std::min(part.size(), kPieceMost);
      works = use.update(context_.get(), nullptr, &unused, raw(part), static_cast<int>(length)) == 1;
      part = part.subspan(length);
    }
  }
  Tag tag;
  unsigned char none = 0;
  works = works && use.end(context_.get(), &none, &unused) == 1 &&
          use.control(context_.get(), kGetTag, static_cast<int>(tag.size()), tag.data()) == 1;
  check(works, "AES-256-GCM");
  return tag;
}

}  // namespace telegrad
