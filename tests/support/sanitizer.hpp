// What sanitizers do not know. ThreadSanitizer: threads that start after a fork, and libgomp's barriers. AddressSanitizer: from
// which library dlopen is called, so that what a library opens is not looked for in its own folder; and to let go of its locks
// in the child of a fork.
#pragma once

namespace narrows::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
inline constexpr bool kAddressSanitizer = false;
#endif

}  // namespace narrows::test
