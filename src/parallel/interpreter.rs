//! Interpreter of a program: returns actions and receives events. It does no IO, holds no tensors
//! and never decides *how* something is done; the caller never decides *what* is next.

use std::collections::BTreeSet;

use super::program::{Instruction, Program};
use super::verdict::Verdict;
use super::{StepError, Token};
use crate::collective::Collective;
use potluck_core::{BucketId, EdgeId, ReductionId, SegmentId};

/// Next action that the caller must perform for a rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    ZeroGradients,
    Load {
        micro_batch: usize,
    },
    Run {
        segment: SegmentId,
        micro_batch: usize,
    },
    /// Send the tensor of an edge.
    Send {
        edge: EdgeId,
        micro_batch: usize,
    },
    /// Write the tensor of an edge to the device, as its values arrive; [`Event::Done`] reports
    /// that all have been written, and no action follows before.
    Receive {
        edge: EdgeId,
        micro_batch: usize,
    },
    /// Reduce the parts of all ranks of the tensor group, and write the result to the device;
    /// [`Event::Done`] reports that it is written, and no action follows before.
    AllReduce {
        reduction: ReductionId,
        micro_batch: usize,
    },
    /// Start this rank's part in a collective; [`Event::Done`] reports its end.
    Start(Collective),
    /// Wait for [`Event::Done`] of this token, or [`Event::Fault`].
    Wait(Token),
    /// Send the step's sums to the coordinator; [`Event::Verdict`] or [`Event::Fault`] is the
    /// answer.
    Vote,
    Update {
        bucket: BucketId,
    },
    /// The step is over; no action follows.
    Finish(Outcome),
}

/// Event that the caller reports to the interpreter.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// This rank's part in an operation is over.
    Done(Token),
    /// The coordinator has decided on the step.
    Verdict(Verdict),
    /// A fault: the step is discarded, and no bucket that is not yet updated is touched.
    Fault(String),
}

/// Result of a step on one rank.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Outcome {
    /// Parameters were updated.
    Updated,
    /// A value was not finite: the batch is consumed, parameters are untouched.
    Skipped,
    /// A fault: the same samples are to run again.
    Discarded(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// A vote was requested; no action until the verdict.
    Voting,
    /// No action until this operation is over.
    Waiting(Token),
    Finished,
}

/// Interpreter state of one rank in one step.
#[derive(Debug)]
pub struct Interpreter<'a> {
    program: &'a Program,
    next: usize,
    state: State,
    outcome: Outcome,
    /// Operations that are over. A collective may be over before the rank starts it: a rank that
    /// owns nothing of a bucket only receives, and other ranks may be ahead of it.
    done: BTreeSet<Token>,
}

impl<'a> Interpreter<'a> {
    /// Creates an interpreter at the first instruction of `program`.
    pub fn new(program: &'a Program) -> Self {
        Self {
            program,
            next: 0,
            state: State::Running,
            outcome: Outcome::Updated,
            done: BTreeSet::new(),
        }
    }

    /// Returns the next action, or `None` if the interpreter waits for an event or the step is
    /// over.
    pub fn poll_action(&mut self) -> Option<Action> {
        while self.state == State::Running {
            let Some(&instruction) = self.program.instructions.get(self.next) else {
                self.state = State::Finished;
                return Some(Action::Finish(self.outcome.clone()));
            };
            self.next += 1;
            if let Some(action) = self.begin(instruction) {
                return Some(action);
            }
        }
        None
    }

    /// Returns the action of an instruction; `None` for a wait on an operation that is
    /// already over.
    fn begin(&mut self, instruction: Instruction) -> Option<Action> {
        Some(match instruction {
            Instruction::ZeroGradients => Action::ZeroGradients,
            Instruction::Load { micro_batch } => Action::Load { micro_batch },
            Instruction::Run { segment, micro_batch } => Action::Run { segment, micro_batch },
            Instruction::Send { edge, micro_batch } => Action::Send { edge, micro_batch },
            Instruction::Recv { edge, micro_batch } => {
                self.state = State::Waiting(Token::receive(edge, micro_batch));
                Action::Receive { edge, micro_batch }
            }
            Instruction::AllReduce { reduction, micro_batch } => {
                self.state = State::Waiting(Token::all_reduce(reduction, micro_batch));
                Action::AllReduce { reduction, micro_batch }
            }
            Instruction::Start(collective) => Action::Start(collective),
            Instruction::Wait(token) if self.done.contains(&token) => return None,
            Instruction::Wait(token) => {
                self.state = State::Waiting(token);
                Action::Wait(token)
            }
            Instruction::Verdict => {
                self.state = State::Voting;
                Action::Vote
            }
            Instruction::Update { bucket } => Action::Update { bucket },
        })
    }

    /// Processes an event.
    ///
    /// # Errors
    /// Returns [`StepError`] for a verdict without a vote and for an operation that is over twice,
    /// which change nothing.
    pub fn handle(&mut self, event: Event) -> Result<(), StepError> {
        match event {
            Event::Done(token) if !self.done.insert(token) => {
                return Err(StepError::DoneTwice(token));
            }
            Event::Done(token) => {
                if self.state == State::Waiting(token) {
                    self.state = State::Running;
                }
            }
            Event::Verdict(_) if self.state != State::Voting => {
                return Err(StepError::UnexpectedVerdict);
            }
            Event::Verdict(verdict) => {
                self.state = State::Running;
                if let Verdict::Skip { .. } = verdict {
                    self.end(Outcome::Skipped);
                }
            }
            Event::Fault(why) if self.state != State::Finished => {
                self.state = State::Running;
                self.end(Outcome::Discarded(why));
            }
            Event::Fault(_) => {}
        }
        Ok(())
    }

    fn end(&mut self, outcome: Outcome) {
        self.next = self.program.instructions.len();
        self.outcome = outcome;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::{SkipReason, Totals};

    fn program() -> Program {
        Program {
            micro_batches: Vec::new(),
            instructions: vec![
                Instruction::Load { micro_batch: 0 },
                Instruction::Run { segment: SegmentId(0), micro_batch: 0 },
                Instruction::Verdict,
                Instruction::Update { bucket: BucketId(0) },
                Instruction::Update { bucket: BucketId(1) },
            ],
        }
    }

    const TOTALS: Totals = Totals { loss: 1.0, count: 1.0, terms: Vec::new(), gradient_norm: 1.0 };

    /// All actions of the program, with `event` as the answer to the vote.
    fn actions(event: &Event) -> Vec<Action> {
        let program = program();
        let mut interpreter = Interpreter::new(&program);
        let mut actions = Vec::new();
        loop {
            match interpreter.poll_action() {
                Some(action) => actions.push(action),
                None if actions.last() == Some(&Action::Vote) => {
                    interpreter.handle(event.clone()).unwrap()
                }
                None => return actions,
            }
        }
    }

    #[test]
    fn a_commit_updates_every_bucket() {
        let actions = actions(&Event::Verdict(Verdict::Commit(TOTALS)));
        assert_eq!(actions.len(), 6);
        assert_eq!(actions[4], Action::Update { bucket: BucketId(1) });
        assert_eq!(actions[5], Action::Finish(Outcome::Updated));
    }

    #[test]
    fn a_skip_or_a_fault_updates_none() {
        let reason = SkipReason::LossNotFinite;
        let skip = actions(&Event::Verdict(Verdict::Skip { totals: TOTALS, reason }));
        assert_eq!(skip[3..], [Action::Finish(Outcome::Skipped)]);
        let fault = actions(&Event::Fault("lost".into()));
        assert_eq!(fault[3..], [Action::Finish(Outcome::Discarded("lost".into()))]);
    }

    const REDUCE: Collective = Collective::reduce_scatter(BucketId(0));
    const GATHER: Collective = Collective::all_gather(BucketId(0));

    fn collectives() -> Program {
        Program {
            micro_batches: Vec::new(),
            instructions: vec![
                Instruction::Start(REDUCE),
                Instruction::Wait(Token::of(REDUCE)),
                Instruction::Verdict,
                Instruction::Start(GATHER),
                Instruction::Wait(Token::of(GATHER)),
            ],
        }
    }

    #[test]
    fn a_wait_lasts_until_its_own_collective_is_over() {
        let program = collectives();
        let mut interpreter = Interpreter::new(&program);
        assert_eq!(interpreter.poll_action(), Some(Action::Start(REDUCE)));
        assert_eq!(interpreter.poll_action(), Some(Action::Wait(Token::of(REDUCE))));
        assert_eq!(interpreter.poll_action(), None);
        interpreter.handle(Event::Done(Token::of(GATHER))).unwrap();
        assert_eq!(interpreter.poll_action(), None);
        interpreter.handle(Event::Done(Token::of(REDUCE))).unwrap();
        assert_eq!(interpreter.poll_action(), Some(Action::Vote));
        interpreter.handle(Event::Verdict(Verdict::Commit(TOTALS))).unwrap();
        assert_eq!(interpreter.poll_action(), Some(Action::Start(GATHER)));
        // The collective was over before this rank started it, so there is no wait.
        assert_eq!(interpreter.poll_action(), Some(Action::Finish(Outcome::Updated)));
    }

    #[test]
    fn a_fault_ends_a_wait_and_what_comes_later_changes_nothing() {
        let program = collectives();
        let mut interpreter = Interpreter::new(&program);
        while interpreter.poll_action().is_some() {}
        interpreter.handle(Event::Fault("lost".into())).unwrap();
        interpreter.handle(Event::Done(Token::of(REDUCE))).unwrap();
        let end = Action::Finish(Outcome::Discarded("lost".into()));
        assert_eq!(interpreter.poll_action(), Some(end));
        interpreter.handle(Event::Done(Token::of(GATHER))).unwrap();
        interpreter.handle(Event::Fault("late".into())).unwrap();
        assert_eq!(interpreter.poll_action(), None);
    }

    #[test]
    fn an_event_that_is_not_due_is_an_error_and_changes_nothing() {
        let program = collectives();
        let mut interpreter = Interpreter::new(&program);
        interpreter.handle(Event::Done(Token::of(REDUCE))).unwrap();
        let twice = interpreter.handle(Event::Done(Token::of(REDUCE)));
        assert_eq!(twice, Err(StepError::DoneTwice(Token::of(REDUCE))));
        let verdict = interpreter.handle(Event::Verdict(Verdict::Commit(TOTALS)));
        assert_eq!(verdict, Err(StepError::UnexpectedVerdict));
        assert_eq!(interpreter.poll_action(), Some(Action::Start(REDUCE)));
        assert_eq!(interpreter.poll_action(), Some(Action::Vote));
    }

    #[test]
    fn a_fault_before_the_vote_ends_the_step_at_once() {
        let program = program();
        let mut interpreter = Interpreter::new(&program);
        interpreter.poll_action();
        interpreter.handle(Event::Fault("no memory".into())).unwrap();
        let end = Action::Finish(Outcome::Discarded("no memory".into()));
        assert_eq!(interpreter.poll_action(), Some(end));
        assert_eq!(interpreter.poll_action(), None);
    }
}
