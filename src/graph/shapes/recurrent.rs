//! Shape rules of recurrent layers and of their gradients.

use crate::op::Cell;
use potluck_core::Shape;

/// Returns the output shapes of a recurrent layer on `x, weight, bias` and a whole state or none.
pub fn recurrent(cell: Cell, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let gates = cell.gates();
    let wanted = format!("x is (b, t, {gates}h), weight ({gates}h, h), bias ({gates}h)");
    let [b, t, columns] = *x[0].dims() else { return Err(wanted) };
    let h = columns / gates;
    let is_weight = *x[1] == Shape::fixed(&[columns, h]) && *x[2] == Shape::fixed(&[columns]);
    if h * gates != columns || !is_weight || x[0].is_batched() && b != 1 {
        return Err(wanted);
    }
    let states = x.len() - 3;
    if states != 0 && states != cell.states()
        || x[3..].iter().any(|s| **s != x[0].with_dims(&[b, h]))
    {
        return Err(format!("the state is {} of (b, h)", cell.states()));
    }
    let y = x[0].with_dims(&[b, t, h]);
    let gates = x[0].with_dims(&[b, t, 4 * h]);
    Ok(match cell {
        Cell::Lstm => vec![y.clone(), gates, y],
        Cell::Gru => vec![y, gates],
    })
}

/// Returns the output shapes of the gradient of a recurrent layer.
pub fn recurrent_grad(cell: Cell, x: &[&Shape]) -> Result<Vec<Shape>, String> {
    let gates = cell.gates();
    let wanted = format!(
        "gates are (b, t, 4h), weight ({gates}h, h), hidden values and dy (b, t, h), a state (b, h)"
    );
    let [b, t, h] = *x[3].dims() else { return Err(wanted) };
    let state = x[3].with_dims(&[b, h]);
    let fits = *x[0] == x[3].with_dims(&[b, t, 4 * h])
        && *x[1] == Shape::fixed(&[gates * h, h])
        && x[2] == x[3]
        && x[4..].iter().all(|s| **s == state)
        && (b == 1 || !x[3].is_batched());
    if !fits {
        return Err(wanted);
    }
    let dx = x[3].with_dims(&[b, t, gates * h]);
    Ok(match cell {
        Cell::Lstm => vec![dx, state.clone(), state],
        Cell::Gru => vec![dx.clone(), dx, state],
    })
}
