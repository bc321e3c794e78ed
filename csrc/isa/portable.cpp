#define MOESTRO_ISA moestro_portable
#include "../bytes_portable.h"
#include "../epilogue.h"
#include "../int8.h"

namespace moestro {
static bool runs_here() { return true; }
extern const Isa kPortable = {"portable", "nothing", runs_here, MOESTRO_ISA::W, MOESTRO_ISA::four_rows, MOESTRO_ISA::kDirectTokens,
                              MOESTRO_ISA::widen, MOESTRO_ISA::activate, MOESTRO_ISA::combine, nullptr, &MOESTRO_ISA::kRounded};
}  // namespace moestro
