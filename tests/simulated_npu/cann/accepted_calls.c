// The calls of accepted_calls.def. Their prototypes are left out on purpose: no argument is read, and 0 is success.
#define ACCEPTED(name, reason) \
    long name(void) { return 0; }
#include "accepted_calls.def"
