// Sums over the invocations of a workgroup of GROUP that share one of COLUMNS columns: those with
// the same remainder by COLUMNS. A file that uses it has these constants and the type Sums. No
// bytes of storage are moved.

var<workgroup> column_parts: array<Sums, GROUP>;

// The sum of `mine` over the invocations of a column, in order, for the first of them. All
// invocations of the workgroup must call it, and between two calls there must be a barrier.
fn sum_of_column(mine: Sums, local: u32) -> Sums {
    column_parts[local] = mine;
    workgroupBarrier();
    var sum = mine;
    if (local < COLUMNS) {
        for (var other = local + COLUMNS; other < GROUP; other += COLUMNS) {
            sum += column_parts[other];
        }
    }
    return sum;
}
