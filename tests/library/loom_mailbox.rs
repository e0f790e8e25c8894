//! The hand-over between threads under loom, which tries every order in which the threads may run:
//! the very file of the library, with loom's locks in place of the standard library's.

use std::time::{Duration, Instant};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

mod sync {
    pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
}

#[path = "../../src/parallel/comm/mailbox.rs"]
mod mailbox;

use mailbox::{Closed, Mailbox, RecvError, SendError};

#[test]
fn waiting_is_woken_senders_in_order() {
    loom::model(|| {
        let mailbox = Mailbox::new(3);
        let senders: Vec<_> = [&[10, 11][..], &[20]]
            .into_iter()
            .map(|items| {
                let mailbox = mailbox.clone();
                thread::spawn(move || items.iter().try_for_each(|item| mailbox.send(*item)))
            })
            .collect();
        let came: Vec<i32> = (0..3).map(|_| mailbox.recv(None).unwrap()).collect();
        let of_one: Vec<i32> = came.iter().copied().filter(|item| *item < 20).collect();
        assert_eq!(of_one, [10, 11]);
        assert!(came.contains(&20));
        assert_eq!(mailbox.try_recv(), Ok(None));
        for sender in senders {
            sender.join().unwrap().unwrap();
        }
    });
}

#[test]
fn close_wakes_all_with_first_reason() {
    loom::model(|| {
        let mailbox = Mailbox::<i32>::new(1);
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let mailbox = mailbox.clone();
                thread::spawn(move || mailbox.recv(None))
            })
            .collect();
        mailbox.close("first");
        mailbox.close("second");
        assert_eq!(mailbox.closed(), Some(Closed("first".into())));
        let why = Closed("first".into());
        for waiting in waiting {
            assert_eq!(waiting.join().unwrap(), Err(RecvError::Closed(why.clone())));
        }
        assert_eq!(mailbox.closed(), Some(why.clone()));
        assert_eq!(mailbox.send(1), Err(SendError::Closed(why.clone())));
        assert_eq!(mailbox.try_recv(), Err(why));
    });
}

/// Counts how often it is dropped.
struct Parcel(Arc<AtomicUsize>);

impl Drop for Parcel {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn item_has_one_owner_despite_close() {
    loom::model(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        let mailbox = Mailbox::new(1);
        let sender = {
            let (mailbox, parcel) = (mailbox.clone(), Parcel(drops.clone()));
            thread::spawn(move || mailbox.send(Box::new(parcel)).is_ok())
        };
        let closer = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.close("over"))
        };
        let got = mailbox.recv(None);
        let was_sent = sender.join().unwrap();
        closer.join().unwrap();
        assert!(was_sent || got.is_err(), "what was refused has come");
        assert_eq!(drops.load(Ordering::SeqCst), usize::from(got.is_err()));
        drop(got);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn ownership_goes_around_two_threads() {
    loom::model(|| {
        let (there, back) = (Mailbox::new(1), Mailbox::new(1));
        let other = {
            let (there, back) = (there.clone(), back.clone());
            thread::spawn(move || {
                let mut values: Box<[i32; 2]> = there.recv(None).unwrap();
                values[1] += 1;
                back.send(values).unwrap();
            })
        };
        there.send(Box::new([1, 2])).unwrap();
        assert_eq!(*back.recv(None).unwrap(), [1, 3]);
        other.join().unwrap();
    });
}

/// Loom knows no time: a deadline that has passed does not wait, and one far off is a wait.
#[test]
fn deadline_ends_only_empty_waits() {
    loom::model(|| {
        let mailbox = Mailbox::new(1);
        assert_eq!(mailbox.recv(Some(Instant::now())), Err(RecvError::TimedOut));
        let sender = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.send(1).unwrap())
        };
        let deadline = Instant::now() + Duration::from_secs(3600);
        assert_eq!(mailbox.recv(Some(deadline)), Ok(1));
        sender.join().unwrap();
        mailbox.send(2).unwrap();
        assert_eq!(mailbox.recv(Some(Instant::now())), Ok(2));
    });
}

/// One of two senders finds the mailbox full, and whoever waits or sends afterwards learns why.
#[test]
fn item_over_capacity_closes_mailbox() {
    loom::model(|| {
        let mailbox = Mailbox::new(1);
        let other = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.send(1))
        };
        let results = [mailbox.send(2), other.join().unwrap()];
        let full = SendError::Full { items_max: 1 };
        assert!(results.contains(&Ok(())) && results.contains(&Err(full.clone())), "{results:?}");
        let why = Closed::from(full);
        assert_eq!(why.0, "a mailbox for 1 items is full, which is a defect of potluck");
        assert_eq!(mailbox.recv(None), Err(RecvError::Closed(why.clone())));
        assert_eq!(mailbox.send(3), Err(SendError::Closed(why)));
    });
}

/// A newer item takes the place of an older one: the receiver sees the newer one, or both in order,
/// and the queue never holds both.
#[test]
fn item_replacing_needs_no_room() {
    loom::model(|| {
        let mailbox = Mailbox::new(1);
        let sender = {
            let mailbox = mailbox.clone();
            thread::spawn(move || {
                (1..3).try_for_each(|item| mailbox.send_in_place_of(item, |old| *old < item))
            })
        };
        let first: i32 = mailbox.recv(None).unwrap();
        sender.join().unwrap().unwrap();
        let then = mailbox.try_recv().unwrap();
        assert_eq!(then, if first == 1 { Some(2) } else { None });
    });
}

/// Asks the mailbox in which it lay, when it is dropped.
struct AsksWhenDropped(Mailbox<AsksWhenDropped>);

impl Drop for AsksWhenDropped {
    fn drop(&mut self) {
        self.0.closed();
    }
}

/// An item that is refused or replaced is dropped without the lock, which its drop may need.
#[test]
fn items_are_dropped_outside_the_lock() {
    loom::model(|| {
        let mailbox = Mailbox::new(1);
        let item = || AsksWhenDropped(mailbox.clone());
        mailbox.send(item()).unwrap();
        mailbox.send_in_place_of(item(), |_| true).unwrap();
        assert!(matches!(mailbox.send(item()), Err(SendError::Full { .. })));
        assert!(matches!(mailbox.send(item()), Err(SendError::Closed(_))));
        assert!(matches!(mailbox.send_in_place_of(item(), |_| true), Err(SendError::Closed(_))));
    });
}
