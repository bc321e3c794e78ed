// How far two threads of a team are from one another: what they have in common takes so long from one to the other.
#pragma once

namespace moestro {

// The seconds that a cache line takes from the first thread of a team to another one and back, the longest of the
// others; the least of several runs for each, all of them about `seconds` long, and up to twenty times as long where a
// trip takes over a microsecond, as between threads that share a core. 0 where the team has one thread.
double round_trip(int num_threads, double seconds);

}  // namespace moestro
