// Compiles WGSL texts with Tint, the compiler of Dawn and Chromium.
//   node compile.mjs TEXTS    TEXTS: a JSON file, [{ "name": .., "text": .. }, ..]
// Prints a JSON array of the errors, [{ "name": .., "error": .. }, ..]. Imports the npm package
// webgpu from the directory that TINT_MODULES names.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const entry = join(process.env.TINT_MODULES, 'node_modules', 'webgpu', 'index.js');
const { create, globals } = await import(pathToFileURL(entry).href);
Object.assign(globalThis, globals);

const gpu = create(['enable-dawn-features=allow_unsafe_apis']);
const adapter = await gpu.requestAdapter();
if (!adapter) throw new Error('Dawn finds no adapter');
const requiredFeatures = ['subgroups', 'shader-f16'].filter((one) => adapter.features.has(one));
const device = await adapter.requestDevice({ requiredFeatures });

const errors = [];
for (const { name, text } of JSON.parse(readFileSync(process.argv[2], 'utf8'))) {
    device.pushErrorScope('validation');
    const module = device.createShaderModule({ code: text });
    const { messages } = await module.getCompilationInfo();
    await device.popErrorScope();
    const error = messages.find(({ type }) => type === 'error');
    if (error) errors.push({ name, error: `${error.lineNum}:${error.linePos} ${error.message}` });
}
process.stdout.write(JSON.stringify(errors) + '\n', () => process.exit(0));
