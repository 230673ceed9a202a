// What keeps the C face safe: no exception crosses it, and a struct is read only as far as both sides know it.
#pragma once

#include "core/error.hpp"

#include <narrows/narrows.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

namespace narrows::boundary {

/// Of this thread; "" after a call that succeeded.
const char* last_error() noexcept;
void set_last_error(std::string_view text) noexcept;

constexpr narrows_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_value: return narrows_invalid_value;
    case ErrorCode::invalid_type: return narrows_invalid_type;
    case ErrorCode::not_implemented: return narrows_not_implemented;
    case ErrorCode::out_of_memory: return narrows_out_of_memory;
    case ErrorCode::invalid_file: return narrows_invalid_file;
    case ErrorCode::internal: return narrows_internal;
  }
  return narrows_internal;
}

/// Runs the body of an entry point and turns whatever it throws into a status and this thread's last error.
template <class Body> narrows_status guard(Body&& body) noexcept {
  const auto failed = [](narrows_status status, std::string_view text) {
    set_last_error(text);
    return status;
  };
  try {
    body();
    return failed(narrows_ok, "");
  } catch (const Error& error) {
    return failed(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(narrows_out_of_memory, "out of memory");
  } catch (const std::exception& error) {
    return failed(narrows_internal, error.what());
  } catch (...) {
    return failed(narrows_internal, "an exception of unknown type");
  }
}

/// No field list grows by more than this between a library and a header that it may meet: a larger size is a wrong one,
/// and the bytes that it claims are not read.
inline constexpr std::size_t kMostUnknownBytes = 4096;

/// Read bytewise: the caller's struct may be of another release, so another type.
inline std::size_t struct_size_of(const void* given) {
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  return size;
}

/// Refuses a null pointer, a size that no release of `Struct` had, and fields that this library does not know, if set.
/// `first_size` is the size of the struct in its first release.
template <class Struct> void check_struct(const Struct* given, std::string_view argument, std::size_t first_size) {
  if (!given) refuse_value(argument, "NULL", "this argument is required");
  const std::string field = std::string(argument) + ".struct_size";
  const std::size_t size = struct_size_of(given);
  if (size < first_size || size % alignof(Struct) != 0 || size > sizeof(Struct) + kMostUnknownBytes)
    refuse_value(field, std::to_string(size), "must be the sizeof of the struct in the caller's header",
                 std::to_string(sizeof(Struct)));
  if (size <= sizeof(Struct)) return;
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(given);
  const bool unknown = std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char byte) { return byte != 0; });
  if (unknown)
    refuse_value(field, std::to_string(size),
                 text("a field beyond the ", std::to_string(sizeof(Struct)), " bytes that this library (", version(),
                      ") knows is set"),
                 std::to_string(sizeof(Struct)));
}

/// A copy as this library knows the struct; what an older caller's lacks is zero.
template <class Struct> Struct read_struct(const Struct* given, std::string_view argument, std::size_t first_size) {
  check_struct(given, argument, first_size);
  Struct known{};
  std::memcpy(&known, given, std::min(struct_size_of(given), sizeof known));
  return known;
}

/// Writes what the caller's struct has room for and leaves its size and the bytes beyond this library's as they are.
template <class Struct> void write_struct(Struct* target, const Struct& value) {
  const std::size_t size = struct_size_of(target);
  std::memcpy(target, &value, std::min(size, sizeof value));
  std::memcpy(target, &size, sizeof size);
}

}  // namespace narrows::boundary
