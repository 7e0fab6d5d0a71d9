// The compute threads: one job at a time, run by every thread together, split into loops with barriers between them.
//
// Threads sleep between jobs and spin between the loops of a job. Loops hand out their chunks dynamically, because on a
// machine with few cores the event loop's thread takes one of them away at any moment.
#pragma once
#include <atomic>
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

    // Run `job(thread)` on every thread; returns when all are done. One caller at a time.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        if (threads_ > 1) wake();
        job(0);
        barrier();
    }

    // Inside a job: call body(i) for each i in [0, n), `grain` of them at a time, and wait for the other threads.
    // Every thread of the job must reach it with the same n.
    template <class F>
    INLINE void loop(int n, int grain, const F& body) {
        if (threads_ == 1) {
            for (int i = 0; i < n; i++) body(i);
            return;
        }
        for (int first; (first = next_.fetch_add(grain, std::memory_order_relaxed)) < n;)
            for (int i = first, end = first + grain < n ? first + grain : n; i < end; i++) body(i);
        barrier();
    }

  private:
    // The last to arrive resets the loop counter and opens the barrier.
    void barrier() {
        if (threads_ == 1) return;
        uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase;)
            if (++spins < 300) pause(); else std::this_thread::yield();
    }
    void wake() {
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }
    void serve(int thread) {
        for (uint32_t seen = 0;;) {
            for (int spins = 0; jobs_.load(std::memory_order_acquire) == seen && spins < 500; spins++) pause();
            jobs_.wait(seen, std::memory_order_acquire);
            seen++;
            if (stopping_) return;
            (*job_)(thread);
            barrier();
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
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> jobs_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> next_{0};
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
