// The compute threads: one job at a time, a list of loops whose tasks the threads share.
//
// Threads sleep between jobs and spin between the loops of a job. On a machine with few cores the event loop's thread takes
// one of them away at any moment, so nobody is waited for who holds no task: tasks are handed out one by one, a loop is over
// when its tasks are, and a thread that was away passes over what the others have done meanwhile. Between loops, where it
// holds no task, each thread offers its core to whoever has been waiting for one.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>
#include "simd.h"

namespace octavo {

class Pool {
  public:
    explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
        for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { serve(i); });
    }
    ~Pool() {
        stopping_ = true;
        wake();
        for (auto& t : workers_) t.join();
    }
    int threads() const { return threads_; }

    // Run `job(thread)` on every thread that comes; returns when all loops are done and nobody is inside. One caller at a time.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        current_ = first_ = (uint32_t)(state_.load(std::memory_order_relaxed) >> 32);
        offered_ = std::chrono::steady_clock::now();
        if (threads_ > 1) {
            inside_.store(OPEN, std::memory_order_release);
            wake();
        }
        job(0);
        if (threads_ == 1) return;
        inside_.fetch_sub(OPEN, std::memory_order_acq_rel);
        wait([&] { return inside_.load(std::memory_order_acquire) == 0; });
    }

    // Inside a job: call body(i) for each i in [0, n), `grain` of them at a time, and wait until all are done.
    // Every thread of the job must reach it with the same n.
    template <class F>
    INLINE void loop(int n, int grain, const F& body) {
        if (threads_ == 1) {
            for (int i = 0; i < n; i++) body(i);
            return;
        }
        if (n <= 0) return;
        offer();
        const uint32_t mine = current_++;
        int own = 0;  // tasks done here
        for (uint64_t state = state_.load(std::memory_order_acquire); (uint32_t)(state >> 32) == mine;) {
            const int first = (int)(uint32_t)state;
            if (first >= n) {
                if (own && done_.fetch_add(own, std::memory_order_acq_rel) + own == n) {
                    done_.store(0, std::memory_order_relaxed);
                    state_.store((uint64_t)(mine + 1) << 32, std::memory_order_release);
                } else {
                    wait([&] { return (uint32_t)(state_.load(std::memory_order_acquire) >> 32) != mine; });
                }
                return;
            }
            if (!state_.compare_exchange_weak(state, state + grain, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            const int end = first + grain < n ? first + grain : n;
            for (int i = first; i < end; i++) body(i);
            own += end - first;
            state = state_.load(std::memory_order_acquire);
        }
    }

  private:
    static constexpr int OPEN = 1 << 30;  // of `inside_`: a job may be entered

    template <class F>
    static INLINE void wait(const F& over) {
        for (int spins = 0; !over();)
            if (++spins < 300) pause(); else std::this_thread::yield();
    }
    static INLINE void offer() {
        const auto now = std::chrono::steady_clock::now();
        if (now - offered_ < std::chrono::microseconds(100)) return;
        std::this_thread::yield();
        offered_ = std::chrono::steady_clock::now();
    }
    void wake() {
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }
    void serve(int thread) {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; jobs_.load(std::memory_order_acquire) == seen && spins < 500; spins++) pause();
            jobs_.wait(seen, std::memory_order_acquire);
            seen = jobs_.load(std::memory_order_acquire);
            if (stopping_) return;
            // A thread that wakes late finds the job closed and stays out.
            int inside = inside_.load(std::memory_order_acquire);
            while (inside >= OPEN && !inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {}
            if (inside < OPEN) continue;
            current_ = first_;
            offered_ = std::chrono::steady_clock::now();
            (*job_)(thread);
            inside_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    const int threads_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    uint32_t first_ = 0;  // the job's first loop
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> jobs_{0};
    alignas(64) std::atomic<int> inside_{0};      // workers in the job, and OPEN
    alignas(64) std::atomic<uint64_t> state_{0};  // the loop that is under way, and above its lower 32 bits how many were: number << 32 | next task
    alignas(64) std::atomic<int> done_{0};        // its tasks that are
    static inline thread_local uint32_t current_; // the loop this thread is at
    static inline thread_local std::chrono::steady_clock::time_point offered_;
};

// Who shares the loops of an operation: all threads of a job, or the calling thread alone, which then waits for nobody.
struct Team {
    Pool* pool;
    template <class F>
    INLINE void loop(int n, int grain, const F& body) const {
        if (pool) return pool->loop(n, grain, body);
        for (int i = 0; i < n; i++) body(i);
    }
};

}  // namespace octavo
