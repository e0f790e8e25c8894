//! The system's allocator, with the bytes that are allocated, and the most that were at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting {
    now: AtomicUsize,
    most: AtomicUsize,
}

#[global_allocator]
static ALLOCATOR: Counting = Counting { now: AtomicUsize::new(0), most: AtomicUsize::new(0) };

/// Returns the bytes that are allocated.
pub fn allocated() -> usize {
    ALLOCATOR.now.load(Ordering::Relaxed)
}

/// Returns the most bytes that were allocated at a time since [`forget_peak`].
pub fn peak() -> usize {
    ALLOCATOR.most.load(Ordering::Relaxed)
}

pub fn forget_peak() {
    ALLOCATOR.most.store(allocated(), Ordering::Relaxed);
}

impl Counting {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most.fetch_max(now, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator as it is, which keeps its contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.subtract(layout.size());
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}
