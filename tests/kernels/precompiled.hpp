// What the tests of device text include ahead of their namespaces, compiled once for all of them; support/precompiled.hpp says
// how. No header of src/shared, nor one that includes it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernels/device/device.hpp"
