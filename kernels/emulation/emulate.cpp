// Runs kernels under the rules of emulate.hpp. Linked into every library of kernels, so all of it is one launch at a time.
#undef _FORTIFY_SOURCE // jumps between stacks are meant
#define EMULATION
#include "emulate.hpp"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

uint3 threadIdx, blockIdx, blockDim, gridDim;

// Memory of a launch; beside `Range` of src/cuda/emulated.rs.
struct Range {
    u64 at, bytes, writable;
};

// Beside `Launch` of src/cuda/emulated.rs.
struct Launch {
    void (*call)(const void *); // runs the kernel as one thread
    const void *context;        // for it
    u64 blocks, threads;
    u64 order; // of blocks, and of threads of a block: 0 forward, 1 reverse, else shuffled by this
    const Range *ranges;
    u64 range_count;
};

namespace {

const size_t STACK = 256 << 10;
const u64 PATIENCE = 1 << 27; // accesses of one thread while no other runs

// An access: its thread, counted over the grid from 1, and when in the life of its block.
struct Access {
    u32 thread, time;
};

// The last accesses to a byte.
struct Cell {
    Access write, atomic, reads[2];
    u32 reading_block; // whose reads these are, counted from 1; MANY if there were others
};
const u32 MANY = ~0u;

struct Memory {
    Range range;
    std::vector<Cell> cells;
};

struct Fiber {
    char *stack;
    ucontext_t context;
    jmp_buf at;
    bool started;
};

enum State { UNSTARTED, RUNNING, IN_COLLECTIVE, AT_BARRIER, ENDED };

struct Thread {
    State state;
    Fiber *fiber;
    u64 result;
};

// A collective that some lanes wait in.
struct Pending {
    emulated::Collective kind;
    u32 mask, width, arrived, argument[32];
    u64 value[32];
};

struct Warp {
    Pending pending[32]; // by the lowest lane of the mask
    u32 time;            // collectives done
};

const Launch *launch;
char *message;
u64 capacity;
std::vector<Memory> memories;
size_t last_memory;
std::vector<std::unique_ptr<Fiber>> fibers; // all
std::vector<Fiber *> idle;
std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<u32> order; // of the block's threads
std::deque<u32> ready;
size_t unstarted; // place in the order
u32 ended, waiting, votes, barriers;
u32 current; // thread
u64 patience;
std::vector<bool> released; // blocks that came to a fence
bool acquired;              // whether the block did an atomic operation on global memory
jmp_buf scheduler, failed;

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = std::snprintf(message, capacity, "block %u, thread %u: ", blockIdx.x, current);
    if (length >= 0 && (u64)length < capacity) std::vsnprintf(message + length, capacity - length, format, arguments);
    va_end(arguments);
    _longjmp(failed, 1);
}

// Orders without a library's generator, so that a number means the same everywhere.
std::vector<u32> ordered(u32 n, u64 seed) {
    std::vector<u32> list(n);
    for (u32 i = 0; i < n; i++) list[i] = seed == 1 ? n - 1 - i : i;
    if (seed < 2) return list;
    for (u32 i = n; i > 1; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        std::swap(list[i - 1], list[(seed >> 33) % i]);
    }
    return list;
}

// Fibers.

void begin(u32 thread, Fiber *fiber) {
    current = thread;
    threadIdx.x = thread;
    threads[thread].state = RUNNING;
    threads[thread].fiber = fiber;
    patience = PATIENCE;
}

// Threads that nothing makes wait take turns on one fiber.
void fiber_main() {
    for (;;) {
        launch->call(launch->context);
        threads[current].state = ENDED;
        ended++;
        Fiber *fiber = threads[current].fiber;
        if (unstarted < order.size()) {
            begin(order[unstarted++], fiber);
        } else {
            idle.push_back(fiber);
            if (_setjmp(fiber->at) == 0) _longjmp(scheduler, 1);
        }
    }
}

Fiber *fresh() {
    if (idle.empty()) {
        std::unique_ptr<Fiber> fiber(new Fiber());
        // The lowest page stays out of reach.
        void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE) != 0) fail("no memory for the stack of a thread");
        fiber->stack = (char *)stack;
        idle.push_back(fiber.get());
        fibers.push_back(std::move(fiber));
    }
    Fiber *fiber = idle.back();
    idle.pop_back();
    return fiber;
}

// Runs the current thread until it ends or waits.
void enter(Fiber *fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber->started) _longjmp(fiber->at, 1);
    fiber->started = true;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK;
    makecontext(&fiber->context, fiber_main, 0);
    setcontext(&fiber->context);
}

void suspend(State state) {
    Fiber *fiber = threads[current].fiber;
    threads[current].state = state;
    if (_setjmp(fiber->at) == 0) _longjmp(scheduler, 1);
}

void wake(u32 thread) {
    threads[thread].state = RUNNING;
    ready.push_back(thread);
}

// Every thread has ended or waits.
[[noreturn]] void stuck() {
    for (u32 w = 0; w < warps.size(); w++) {
        for (Pending &p : warps[w].pending) {
            if (p.arrived == 0) continue;
            u32 missing = p.mask & ~p.arrived;
            current = 32 * w + __builtin_ctz(p.arrived);
            u32 other = 32 * w + __builtin_ctz(missing);
            fail("lanes diverged: a collective of mask %#x waits for lanes %#x, of which the first %s", p.mask, missing,
                 other >= threads.size()            ? "is beyond the block"
                 : threads[other].state == ENDED      ? "has ended"
                 : threads[other].state == AT_BARRIER ? "waits at a barrier"
                                                      : "waits in a collective of another mask");
        }
    }
    for (u32 t = 0; t < threads.size(); t++)
        if (threads[t].state == AT_BARRIER) current = t;
    fail("a barrier that %zu of %zu threads never reach", threads.size() - waiting, threads.size());
}

extern "C" {
extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
}

void run_block(u32 block) {
    blockIdx.x = block;
    acquired = false;
    barriers = waiting = votes = ended = 0;
    Memory &shared = memories.back();
    std::memset((void *)shared.range.at, 0xA5, shared.range.bytes);
    std::fill(shared.cells.begin(), shared.cells.end(), Cell());
    threads.assign(blockDim.x, Thread());
    warps.resize((blockDim.x + 31) / 32);
    for (Warp &warp : warps) {
        warp.time = 0;
        for (Pending &pending : warp.pending) pending.arrived = 0;
    }
    ready.clear();
    unstarted = 0;
    while (ended < blockDim.x) {
        if (unstarted < order.size()) {
            Fiber *fiber = fresh();
            begin(order[unstarted++], fiber);
            enter(fiber);
        } else if (!ready.empty()) {
            current = threadIdx.x = ready.front();
            ready.pop_front();
            patience = PATIENCE;
            enter(threads[current].fiber);
        } else {
            stuck();
        }
    }
}

// Accesses.

u32 now() { return (barriers & 0xFFF) << 20 | (warps[current / 32].time & 0xFFFFF); }
u32 my_thread() { return blockIdx.x * blockDim.x + current + 1; }

// Whether something orders an earlier access before one of the current thread.
bool precedes(Access earlier) {
    u32 mine = my_thread();
    if (earlier.thread == 0 || earlier.thread == mine) return true;
    u32 block = (earlier.thread - 1) / blockDim.x, thread = (earlier.thread - 1) % blockDim.x;
    if (block != blockIdx.x) return released[block] && acquired;
    if (thread / 32 == current / 32) return earlier.time != now();
    return earlier.time >> 20 != now() >> 20;
}

const char *verb(bool write) { return write ? "write" : "read"; }

// What an access is to, or null; of no more than the first byte.
Memory *find(u64 at, u64 bytes, bool write) {
    for (size_t i = 0; i < memories.size(); i++) {
        size_t place = (last_memory + i) % memories.size();
        const Range &range = memories[place].range;
        if (at - range.at < range.bytes) {
            last_memory = place;
            if (bytes > range.bytes - (at - range.at))
                fail("%s of %llu bytes at byte %llu of memory %zu, which has %llu", verb(write), (unsigned long long)bytes,
                     (unsigned long long)(at - range.at), place, (unsigned long long)range.bytes);
            if (write && !range.writable)
                fail("write at byte %llu of memory %zu, which is only read", (unsigned long long)(at - range.at), place);
            return &memories[place];
        }
    }
    return nullptr;
}

[[noreturn]] void outside(u64 at, u64 bytes, bool write) {
    size_t nearest = 0;
    u64 far = ~0ull;
    for (size_t i = 0; i < memories.size(); i++) {
        const Range &range = memories[i].range;
        u64 gap = at < range.at ? range.at - at : at - (range.at + range.bytes);
        if (gap < far) far = gap, nearest = i;
    }
    const Range &range = memories[nearest].range;
    fail("%s of %llu bytes outside of all memory: at byte %lld of memory %zu, which has %llu", verb(write), (unsigned long long)bytes,
         (long long)(at - range.at), nearest, (unsigned long long)range.bytes);
}

[[noreturn]] void race(const Memory &memory, u64 byte, bool write, Access other, const char *others) {
    u32 thread = other.thread - 1;
    fail("a race: %s of byte %llu of memory %zu after a %s by block %u, thread %u, with nothing between", verb(write),
         (unsigned long long)byte, (size_t)(&memory - memories.data()), others, thread / blockDim.x, thread % blockDim.x);
}

void access(const volatile void *to, u64 bytes, u64 align, bool write, bool atomic = false) {
    const u64 at = (u64)to;
    if (--patience == 0) fail("no end in sight");
    if (at - (u64)threads[current].fiber->stack < STACK) return;
    Memory *memory = find(at, bytes, write);
    if (!memory) {
        // Constants of the kernels themselves.
        if (!write && at >= (u64)__ehdr_start && at + bytes <= (u64)_end) return;
        outside(at, bytes, write);
    }
    if (at % align != 0)
        fail("%s of %llu bytes at byte %llu of memory %zu, which is not aligned to that", verb(write), (unsigned long long)bytes,
             (unsigned long long)(at - memory->range.at), (size_t)(memory - memories.data()));
    const Access me = {my_thread(), now()};
    const u32 block = blockIdx.x + 1;
    for (u64 byte = at - memory->range.at, end = byte + bytes; byte < end; byte++) {
        Cell &cell = memory->cells[byte];
        if (!precedes(cell.write)) race(*memory, byte, write, cell.write, "write");
        if (!atomic && !precedes(cell.atomic)) race(*memory, byte, write, cell.atomic, "atomic operation");
        if (write) {
            for (Access read : cell.reads)
                if (!precedes(read)) race(*memory, byte, write, read, "read");
            if (cell.reading_block == MANY && !acquired)
                fail("a race: write of byte %llu of memory %zu, which other blocks read", (unsigned long long)byte,
                     (size_t)(memory - memories.data()));
            (atomic ? cell.atomic : cell.write) = me;
        } else {
            if (cell.reads[0].thread != me.thread) cell.reads[1] = cell.reads[0];
            cell.reads[0] = me;
            if (cell.reading_block != block) cell.reading_block = cell.reading_block ? MANY : block;
        }
    }
}

} // namespace

namespace emulated {

uint32_t barrier(uint32_t vote) {
    votes += vote;
    if (++waiting < threads.size()) {
        suspend(AT_BARRIER);
        return (u32)threads[current].result;
    }
    u32 count = votes;
    waiting = votes = 0;
    barriers++;
    for (u32 thread : order) {
        threads[thread].result = count;
        if (thread != current) wake(thread);
    }
    return count;
}

static u64 result(const Pending &p, u32 lane) {
    u64 all = p.value[__builtin_ctz(p.mask)];
    u32 inside = lane & (p.width - 1), group = lane & ~(p.width - 1), argument = p.argument[lane], from = lane;
    switch (p.kind) {
    case SYNC: return 0;
    // A lane outside its group of `width` gives the own value.
    case SHUFFLE: from = group | (argument & (p.width - 1)); break;
    case SHUFFLE_UP: from = inside >= argument ? lane - argument : lane; break;
    case SHUFFLE_DOWN: from = inside + argument < p.width ? lane + argument : lane; break;
    case SHUFFLE_XOR: from = (lane ^ argument) < group + p.width ? lane ^ argument : lane; break;
    case BALLOT:
        all = 0;
        for (u32 l = 0; l < 32; l++)
            if (p.mask >> l & 1) all |= p.value[l] << l;
        return all;
    default:
        for (u32 l = __builtin_ctz(p.mask) + 1; l < 32; l++) {
            if (!(p.mask >> l & 1)) continue;
            u32 a = (u32)all, b = (u32)p.value[l];
            all = p.kind == SUM ? a + b : p.kind == MIN ? std::min(a, b) : p.kind == MAX ? std::max(a, b)
                : p.kind == SIGNED_MIN ? (u32)std::min((int)a, (int)b) : p.kind == SIGNED_MAX ? (u32)std::max((int)a, (int)b)
                : p.kind == AND ? a & b : p.kind == OR ? a | b : a ^ b;
        }
        return all;
    }
    if (!(p.mask >> from & 1)) fail("a shuffle from lane %u, which is not in the mask %#x", from, p.mask);
    return p.value[from];
}

uint64_t collective(Collective kind, uint32_t mask, uint64_t value, uint32_t argument, uint32_t width) {
    const u32 lane = current % 32, first = current - lane;
    Warp &warp = warps[current / 32];
    if (!(mask >> lane & 1)) fail("a collective of mask %#x, which this lane is not in", mask);
    if (width == 0 || width > 32 || (width & (width - 1)) != 0) fail("a shuffle of width %u", width);
    Pending &p = warp.pending[__builtin_ctz(mask)];
    if (p.arrived == 0) {
        p.kind = kind, p.mask = mask, p.width = width;
    } else if (p.kind != kind || p.mask != mask || p.width != width) {
        fail("lanes diverged: collective %u of mask %#x where others wait in collective %u of mask %#x", kind, mask, p.kind, p.mask);
    }
    p.arrived |= 1u << lane;
    p.value[lane] = value;
    p.argument[lane] = argument;
    if (p.arrived != mask) {
        suspend(IN_COLLECTIVE);
        return threads[current].result;
    }
    p.arrived = 0;
    warp.time++;
    for (u32 l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        threads[first + l].result = result(p, l);
        if (l != lane) wake(first + l);
    }
    return threads[current].result;
}

void fence() { released[blockIdx.x] = true; }

void atomic(const volatile void *at, uint32_t bytes) {
    // Of shared memory it orders nothing between blocks.
    if ((u64)at - memories.back().range.at >= memories.back().range.bytes) acquired = true;
    access(at, bytes, bytes, true, true);
}

} // namespace emulated

// What the compiler calls. Of a race detector:
#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define ACCESS(bytes)                                                                                                  \
    HOOK __tsan_read##bytes(void *at) { access(at, bytes, bytes, false); }                                             \
    HOOK __tsan_write##bytes(void *at) { access(at, bytes, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK __tsan_read_range(void *at, u64 bytes) { access(at, bytes, 1, false); }
HOOK __tsan_write_range(void *at, u64 bytes) { access(at, bytes, 1, true); }
HOOK __tsan_init() {}
HOOK __tsan_func_entry(void *) {}
HOOK __tsan_func_exit() {}

// Of one for undefined behaviour: each tells its place first.
struct Place {
    const char *file;
    u32 line, column;
};
#define UNDEFINED(name, text)                                                                                          \
    HOOK __ubsan_handle_##name(const Place *at) { fail(text " at %s:%u", at->file, at->line); }                        \
    HOOK __ubsan_handle_##name##_abort(const Place *at) { fail(text " at %s:%u", at->file, at->line); }
UNDEFINED(type_mismatch_v1, "a null or misaligned pointer")
UNDEFINED(out_of_bounds, "an index out of bounds")
UNDEFINED(shift_out_of_bounds, "a shift too far")
UNDEFINED(add_overflow, "a sum that overflows")
UNDEFINED(sub_overflow, "a difference that overflows")
UNDEFINED(mul_overflow, "a product that overflows")
UNDEFINED(negate_overflow, "a negation that overflows")
UNDEFINED(divrem_overflow, "a division by zero")
UNDEFINED(load_invalid_value, "an invalid value")
UNDEFINED(pointer_overflow, "a pointer that overflows")
UNDEFINED(float_cast_overflow, "a conversion that overflows")
UNDEFINED(builtin_unreachable, "unreachable code")
UNDEFINED(missing_return, "no return")
UNDEFINED(nonnull_arg, "a null argument")
UNDEFINED(invalid_builtin, "an invalid argument of a builtin")

// Runs a launch; 0, or 1 and a message.
extern "C" __attribute__((visibility("default"))) int emulate(const Launch *to_run, char *text, u64 room) {
    launch = to_run, message = text, capacity = room;
    blockDim = {(u32)launch->threads, 1, 1}, gridDim = {(u32)launch->blocks, 1, 1};
    blockIdx = threadIdx = {0, 0, 0};
    current = 0;
    if (_setjmp(failed) != 0) {
        // What is left on the stacks is left for good.
        idle.clear();
        for (auto &fiber : fibers) fiber->started = false, idle.push_back(fiber.get());
        return 1;
    }
    if (launch->threads == 0 || launch->threads > 1024) fail("a block of %llu threads", (unsigned long long)launch->threads);
    if (launch->blocks == 0 || launch->blocks * launch->threads >= MANY)
        fail("a grid of %llu blocks", (unsigned long long)launch->blocks);
    memories.resize(launch->range_count + 1);
    for (u64 i = 0; i < launch->range_count; i++) memories[i].range = launch->ranges[i];
    memories.back().range = {(u64)__start_emulated_shared, (u64)(__stop_emulated_shared - __start_emulated_shared), 1};
    for (Memory &memory : memories) memory.cells.assign(memory.range.bytes, Cell());
    last_memory = 0;
    order = ordered(blockDim.x, launch->order);
    released.assign(launch->blocks, false);
    for (u32 block : ordered(gridDim.x, launch->order)) run_block(block);
    return 0;
}
