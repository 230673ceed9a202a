// The tree that this program was built from, as source_hash.py names it; the record is of no other.
#pragma once

namespace narrows::test {

extern const char* const kSourceHash;

}  // namespace narrows::test
