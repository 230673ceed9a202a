// What the forward kernel of family sm90 is given of a call whose keys lie in a cache or in pages.
#pragma once
#include "shared/decode_args.h"
#include "shared/forward_sm90_args.h"

namespace narrows {

// k_map and v_map are of columns, slots, heads, and rows of the cache or pages; nothing where rows are gathered.
struct CachedForwardArgs : ForwardSm90Args {
  DecodeArgs cache;             // the call, as the kernels of caches are given it
  i32 box_rows = 0, boxes = 0;  // slots that the engine brings at once, none of another page; of a tile of keys
};
static_assert(sizeof(CachedForwardArgs) <= 4096, "a launch has so many bytes of arguments");

}  // namespace narrows
