// The constants stand in the test, before it includes device text.
#pragma once
